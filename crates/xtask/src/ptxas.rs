//! Parses the report of `--ptxas-options=-v`: the registers, shared memory, stack and spills of each kernel.

/// The resources of one kernel in one build.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// The kernel's name.
    pub kernel: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Static shared memory of a block, in bytes, without the dynamic shared memory of the launch.
    pub shared: u32,
    /// Stack frame of a thread, in bytes: arrays that are indexed at run time, and spills.
    pub stack: u32,
    /// Bytes a thread writes to local memory because registers ran out.
    pub spill_stores: u32,
    /// Bytes it reads back.
    pub spill_loads: u32,
}

impl Resources {
    /// Whether registers ran out.
    pub fn spills(&self) -> bool {
        self.spill_stores > 0 || self.spill_loads > 0
    }
}

/// Every kernel of a log. A function that was not inlined counts towards the kernel above it in the log.
pub fn kernels(log: &str) -> Vec<Resources> {
    let mut found: Vec<Resources> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let kernel = rest.split('\'').next().unwrap_or(rest).to_owned();
            found.push(Resources { kernel, ..Resources::default() });
        }
        let Some(last) = found.last_mut() else { continue };
        if let Some(bytes) = before(line, " bytes stack frame") {
            last.stack = last.stack.max(bytes);
            last.spill_stores += before(line, " bytes spill stores").unwrap_or(0);
            last.spill_loads += before(line, " bytes spill loads").unwrap_or(0);
        }
        if let Some(registers) = before(line, " registers") {
            last.registers = registers;
            last.shared = before(line, " bytes smem").unwrap_or(0);
        }
    }
    found
}

/// Compiler warnings and notes about lost performance (wgmma serialised, setmaxnreg ignored).
pub fn warnings(log: &str) -> impl Iterator<Item = &str> {
    let warns = |line: &&str| line.contains("warning") || line.contains("Performance Loss");
    log.lines().map(str::trim).filter(warns)
}

/// The number right before `word`.
fn before(line: &str, word: &str) -> Option<u32> {
    let (start, _) = line.split_once(word)?;
    start.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'bar' for 'sm_80'
ptxas info    : Function properties for bar
ptxas         .     752 bytes stack frame, 1084 bytes spill stores, 1224 bytes spill loads
ptxas info    : Function properties for helper
ptxas         .     16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 24 registers, used 0 barriers, 752 bytes cumulative stack size, 364 bytes cmem[0]
ptxas info    : Compile time = 75.377 ms
ptxas info    : Compiling entry function 'foo' for 'sm_90a'
ptxas info    : Function properties for foo
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem";

    #[test]
    fn every_kernel_is_read() {
        let bar = Resources {
            kernel: "bar".into(),
            registers: 24,
            shared: 0,
            stack: 752,
            spill_stores: 1088,
            spill_loads: 1232,
        };
        let foo = Resources { kernel: "foo".into(), registers: 168, shared: 1024, ..Resources::default() };
        assert!(bar.spills() && !foo.spills());
        assert_eq!(kernels(LOG), [bar, foo]);
    }

    #[test]
    fn other_text_has_no_kernels() {
        assert_eq!(kernels(""), []);
        assert_eq!(kernels("a.cu(3): warning #177-D: variable \"registers\" was declared"), []);
        assert_eq!(kernels("ptxas info    : Used 24 registers"), []);
    }

    #[test]
    fn warnings_and_lost_speed_are_found() {
        let log = "a.cu(3): warning #177-D: x\nptxas info    : (C7510) Potential Performance Loss: wgmma\nUsed 3 registers";
        assert_eq!(warnings(log).count(), 2);
        assert_eq!(warnings(LOG).count(), 0);
    }
}
