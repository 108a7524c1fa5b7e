//! Fewer points that look the same.

/// A column, and the first, lowest, highest and last point that fall into it, each with its index.
type Cell = (usize, [(usize, (f64, f64)); 4]);

/// At most about four points for each of `columns`: the first, the lowest, the highest and the last of those that fall
/// into it, so that no spike is lost. Points must be ordered by x; those that are not finite are left out.
pub fn thin(points: &[(f64, f64)], columns: usize) -> Vec<(f64, f64)> {
    let finite = |point: &&(f64, f64)| point.0.is_finite() && point.1.is_finite();
    let columns = columns.max(1);
    if points.len() <= 4 * columns {
        return points.iter().filter(finite).copied().collect();
    }
    let (Some(first), Some(last)) = (points.iter().find(finite), points.iter().rfind(finite)) else {
        return Vec::new();
    };
    let width = ((last.0 - first.0) / columns as f64).max(f64::MIN_POSITIVE);
    let mut kept = Vec::with_capacity(4 * columns);
    let mut cell: Option<Cell> = None;
    for (i, &point) in points.iter().enumerate().filter(|(_, point)| finite(point)) {
        let at = (((point.0 - first.0) / width) as usize).min(columns - 1);
        match &mut cell {
            Some((column, [_, lowest, highest, last])) if *column == at => {
                if point.1 < lowest.1.1 {
                    *lowest = (i, point);
                }
                if point.1 > highest.1.1 {
                    *highest = (i, point);
                }
                *last = (i, point);
            }
            _ => {
                flush(cell.take(), &mut kept);
                cell = Some((at, [(i, point); 4]));
            }
        }
    }
    flush(cell, &mut kept);
    kept
}

fn flush(cell: Option<Cell>, kept: &mut Vec<(f64, f64)>) {
    let Some((_, mut points)) = cell else { return };
    points.sort_by_key(|(i, _)| *i);
    let mut before = None;
    for (i, point) in points {
        if before != Some(i) {
            kept.push(point);
        }
        before = Some(i);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extremes_and_ends_are_kept_in_order() {
        let mut points: Vec<(f64, f64)> = (0..100_000).map(|i| (f64::from(i), f64::from(i % 7))).collect();
        points[12_345].1 = 99.0;
        points[54_321].1 = -99.0;
        points[77_777].1 = f64::NAN;
        points[88_888].1 = f64::INFINITY;
        let thinned = thin(&points, 200);
        assert!(thinned.len() <= 800, "{}", thinned.len());
        for kept in [points[0], points[12_345], points[54_321], points[99_999]] {
            assert!(thinned.contains(&kept), "{kept:?}");
        }
        assert!(thinned.windows(2).all(|pair| pair[0].0 < pair[1].0));
        assert!(thinned.iter().all(|point| point.1.is_finite()));
        // few points stay as they are
        assert_eq!(thin(&points[..50], 200), points[..50]);
        assert_eq!(thin(&[(1.0, f64::NAN); 9], 1), []);
        assert_eq!(thin(&[(1.0, 2.0); 9], 2), [(1.0, 2.0); 2]);
    }
}
