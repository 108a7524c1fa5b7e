use super::*;
use std::sync::atomic::AtomicU32;

#[test]
fn every_task_runs_once() {
    for threads in [1, 2, 3, 4, 9] {
        let team = Team::new(threads);
        assert_eq!(team.threads(), threads);
        let mut random = 12345_u64;
        for _ in 0..2000 {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let tasks = (random >> 33) as usize % 40;
            let counts: Vec<AtomicU32> = (0..tasks).map(|_| AtomicU32::new(0)).collect();
            team.run(tasks, &|number, worker| {
                assert!(worker < threads);
                counts[number].fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        }
    }
}

#[test]
fn workers_wake_after_sleep() {
    let team = Team::new(2);
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(1));
        let both = AtomicU32::new(0);
        // Each task waits for the other: passes only if two threads take part.
        team.run(2, &|_, _| {
            both.fetch_add(1, Ordering::SeqCst);
            while both.load(Ordering::SeqCst) < 2 {
                std::thread::yield_now();
            }
        })
        .unwrap();
    }
}

#[test]
fn a_share_is_finished_by_others() {
    let team = Team::new(2);
    for tasks in [2, 3, 8, 100] {
        let done = AtomicU32::new(0);
        // The first task of one share waits for all others: passes only if the rest of its share is taken by the other worker.
        team.run(tasks, &|number, _| {
            while number == 0 && done.load(Ordering::SeqCst) + 1 < tasks as u32 {
                std::thread::yield_now();
            }
            done.fetch_add(1, Ordering::SeqCst);
        })
        .unwrap();
        assert_eq!(done.load(Ordering::SeqCst), tasks as u32);
    }
}

#[test]
fn worker_numbers_are_exclusive() {
    let team = Team::new(4);
    let busy = PerWorker::new(&team, |_| AtomicBool::new(false));
    for _ in 0..500 {
        team.run(16, &|_, worker| {
            // SAFETY: the team's own worker number; only one reference.
            let flag = unsafe { busy.get(worker) };
            assert!(!flag.swap(true, Ordering::SeqCst));
            std::hint::spin_loop();
            flag.store(false, Ordering::SeqCst);
        })
        .unwrap();
    }
}

#[test]
fn panics_are_reported_and_the_team_survives() {
    for threads in [1, 3] {
        let team = Team::new(threads);
        for round in 0..50 {
            let ran = AtomicU32::new(0);
            let verdict = team.run(20, &|number, _| {
                ran.fetch_add(1, Ordering::Relaxed);
                assert!(number != 7, "task seven");
            });
            assert_eq!(ran.load(Ordering::Relaxed), 20, "round {round}");
            assert!(verdict.unwrap_err().to_string().contains("task seven"));
            team.run(20, &|_, _| ()).unwrap();
        }
    }
}

#[test]
fn nested_runs_stay_on_their_thread() {
    let team = Team::new(3);
    let other = Team::new(2);
    let total = AtomicU32::new(0);
    team.run(10, &|_, worker| {
        let me = std::thread::current().id();
        team.run(5, &|_, inner| {
            assert_eq!((worker, me), (inner, std::thread::current().id()));
            total.fetch_add(1, Ordering::Relaxed);
        })
        .unwrap();
        other.run(5, &|_, _| assert_eq!(me, std::thread::current().id())).unwrap();
    })
    .unwrap();
    assert_eq!(total.load(Ordering::Relaxed), 50);
}

#[test]
fn threads_may_share_a_team() {
    let team = Team::new(2);
    let total = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..200 {
                    team.run(6, &|_, _| {
                        total.fetch_add(1, Ordering::Relaxed);
                    })
                    .unwrap();
                }
            });
        }
    });
    assert_eq!(total.load(Ordering::Relaxed), 4 * 200 * 6);
}

#[test]
fn chunks_cover_the_range() {
    let team = Team::new(3);
    for (len, chunk) in [(0, 4), (1, 4), (4, 4), (5, 4), (1000, 7), (3, 0)] {
        let hits: Vec<AtomicU32> = (0..len).map(|_| AtomicU32::new(0)).collect();
        team.chunks(len, chunk, |range, _| {
            range.for_each(|i| {
                hits[i].fetch_add(1, Ordering::Relaxed);
            });
        })
        .unwrap();
        assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == 1));
    }
}
