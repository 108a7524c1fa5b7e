//! Which rank this process is, from what launchers set.

use ironhorse_core::{Error, Place, Result};

/// What a launcher says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Environment {
    /// Which rank this is, and of how many.
    pub place: Place,
    /// The number of this rank among those on this machine: the GPU it uses.
    pub local_rank: usize,
    /// How many ranks share the cores of this machine, where the launcher says so and does not divide them itself.
    pub local_world: Option<usize>,
    /// The name or address of the machine on which rank 0 listens.
    pub address: String,
    /// The port on which rank 0 listens.
    pub port: u16,
    /// The secret of the run, which all its ranks know.
    pub token: String,
    /// The name of the launcher.
    pub by: &'static str,
    /// Rank 0 of our own launcher: standard input is the socket that it listens on.
    pub listens_on_stdin: bool,
}

/// The variables of our own launcher.
pub(crate) mod ours {
    pub const RANK: &str = "IRONHORSE_RANK";
    pub const WORLD: &str = "IRONHORSE_WORLD";
    pub const LOCAL_RANK: &str = "IRONHORSE_LOCAL_RANK";
    pub const ADDRESS: &str = "IRONHORSE_ADDRESS";
    pub const PORT: &str = "IRONHORSE_PORT";
    pub const TOKEN: &str = "IRONHORSE_TOKEN";
    pub const LISTENER: &str = "IRONHORSE_LISTENER";
}

/// Ports for launchers that give none.
const FIRST_PORT: u64 = 20_000;
const PORTS: u64 = 10_000;

/// How our own launcher is called in messages.
const OWN: &str = "ironhorse --ranks";

impl Environment {
    /// Whether our own launcher started this process, which then is its parent.
    pub fn is_own(&self) -> bool {
        self.by == OWN
    }

    /// What the environment of this process says; `None` if no launcher started it, or only this one.
    pub fn read() -> Result<Option<Self>> {
        Self::of(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    /// As [`Self::read`], with variables that `get` looks up.
    pub fn of(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let vars = Vars(get);
        let found = if vars.has(ours::RANK) {
            vars.own()?
        } else if vars.has("RANK") && vars.has("WORLD_SIZE") {
            vars.torchrun()?
        } else if vars.has("SLURM_PROCID") && vars.has("SLURM_STEP_ID") && vars.has("SLURM_NTASKS") {
            vars.slurm()?
        } else if vars.has("OMPI_COMM_WORLD_RANK") {
            vars.mpi(
                "mpirun",
                ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"],
            )?
        } else if vars.has("PMI_RANK") {
            vars.mpi("mpiexec", ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"])?
        } else {
            return Ok(None);
        };
        let Place { rank, world } = found.place;
        if rank >= world {
            let by = found.by;
            return Err(Error::Input(format!(
                "{by} says this is rank {rank} of {world}, expected a rank below {world}"
            )));
        }
        Ok(Some(found).filter(|found| found.place.world > 1 || found.listens_on_stdin))
    }
}

struct Vars<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Vars<'_> {
    fn has(&self, name: &str) -> bool {
        (self.0)(name).is_some()
    }

    fn text(&self, name: &str, by: &str) -> Result<String> {
        (self.0)(name)
            .ok_or_else(|| Error::Input(format!("{by} started this process, but {name} is not set")))
    }

    fn number<T: std::str::FromStr>(&self, name: &str, by: &str) -> Result<T> {
        let text = self.text(name, by)?;
        text.parse()
            .map_err(|_| Error::Input(format!("{name} is `{text}`, expected a whole number; {by} sets it")))
    }

    /// A number that a launcher may set.
    fn optional(&self, name: &str, by: &str) -> Result<Option<usize>> {
        if self.has(name) { self.number(name, by).map(Some) } else { Ok(None) }
    }

    /// The token of the user, or what all processes of this run and no others have.
    fn token(&self, of_launcher: String) -> String {
        (self.0)(ours::TOKEN).unwrap_or(of_launcher)
    }

    fn own(&self) -> Result<Environment> {
        let by = OWN;
        let place = Place { rank: self.number(ours::RANK, by)?, world: self.number(ours::WORLD, by)? };
        Ok(Environment {
            place,
            local_rank: self.number(ours::LOCAL_RANK, by)?,
            local_world: Some(place.world),
            address: self.text(ours::ADDRESS, by)?,
            port: self.number(ours::PORT, by)?,
            token: self.text(ours::TOKEN, by)?,
            by,
            listens_on_stdin: self.has(ours::LISTENER) && place.leads(),
        })
    }

    fn torchrun(&self) -> Result<Environment> {
        let by = "torchrun";
        let place = Place { rank: self.number("RANK", by)?, world: self.number("WORLD_SIZE", by)? };
        let local_rank = if self.has("LOCAL_RANK") { self.number("LOCAL_RANK", by)? } else { place.rank };
        let (address, port) = match place.is_alone() {
            true => (String::new(), 0),
            // torchrun's own store has the port
            false => (self.text("MASTER_ADDR", by)?, self.number::<u16>("MASTER_PORT", by)?.wrapping_add(1)),
        };
        let run = (self.0)("TORCHELASTIC_RUN_ID").unwrap_or_default();
        let token = self.token(format!("torchrun {run} {address} {port}"));
        let local_world = self.optional("LOCAL_WORLD_SIZE", by)?;
        Ok(Environment { place, local_rank, local_world, address, port, token, by, listens_on_stdin: false })
    }

    fn slurm(&self) -> Result<Environment> {
        let by = "srun";
        let place = Place { rank: self.number("SLURM_PROCID", by)?, world: self.number("SLURM_NTASKS", by)? };
        let job: u64 = self.number("SLURM_JOB_ID", by)?;
        let step = self.text("SLURM_STEP_ID", by)?;
        let nodes = (self.0)("SLURM_STEP_NODELIST").or_else(|| (self.0)("SLURM_JOB_NODELIST"));
        let given = (self.0)("MASTER_ADDR").or_else(|| nodes.as_deref().and_then(first_host));
        let address = given.ok_or_else(|| {
            Error::Input("srun started this process, but neither SLURM_STEP_NODELIST nor MASTER_ADDR says where rank 0 is".into())
        })?;
        let port = match self.has("MASTER_PORT") {
            true => self.number("MASTER_PORT", by)?,
            false => (FIRST_PORT + (job + step.parse().unwrap_or(0)) % PORTS) as u16,
        };
        let token = self.token(format!("slurm {job} {step}"));
        let local_rank = self.number("SLURM_LOCALID", by)?;
        let local_world = self.optional("LOCAL_WORLD_SIZE", by)?; // srun gives every task cores of its own
        Ok(Environment { place, local_rank, local_world, address, port, token, by, listens_on_stdin: false })
    }

    fn mpi(&self, by: &'static str, [rank, world, local]: [&str; 3]) -> Result<Environment> {
        let place = Place { rank: self.number(rank, by)?, world: self.number(world, by)? };
        let local_rank = if self.has(local) { self.number(local, by)? } else { place.rank };
        let mut local_world = self.optional("LOCAL_WORLD_SIZE", by)?;
        for name in ["OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"] {
            local_world = local_world.map_or_else(|| self.optional(name, by), |known| Ok(Some(known)))?;
        }
        let here = local_world == Some(place.world);
        let address = match (self.0)("MASTER_ADDR") {
            Some(address) => address,
            None if here || place.is_alone() => "127.0.0.1".to_owned(),
            None => {
                return Err(Error::Input(format!(
                    "{by} does not say where rank 0 is; pass it on, such as: {by} -x MASTER_ADDR=$(hostname) -x MASTER_PORT=29500 ..."
                )));
            }
        };
        let names = ["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"];
        let job = names.into_iter().find_map(self.0);
        let token = match (job.as_ref().map(|job| format!("{by} {job}")), (self.0)(ours::TOKEN)) {
            (_, Some(given)) => given,
            (Some(of_job), None) => of_job,
            (None, None) if place.is_alone() => String::new(),
            (None, None) => {
                return Err(Error::Input(format!(
                    "{by} gives this run no name that others do not have, so ranks of two runs could meet; set IRONHORSE_TOKEN to the \
                     same random text for all ranks, as scripts/launch/mpirun.sh does"
                )));
            }
        };
        let port = match self.has("MASTER_PORT") {
            true => self.number("MASTER_PORT", by)?,
            false => {
                let hash = |text: &str| text.bytes().fold(7, |h: u64, b| (h * 31 + u64::from(b)) % PORTS);
                (FIRST_PORT + hash(job.as_ref().unwrap_or(&token))) as u16
            }
        };
        Ok(Environment { place, local_rank, local_world, address, port, token, by, listens_on_stdin: false })
    }
}

/// The first host of a list as Slurm writes it: `node[03-07,09],login` begins with `node03`.
fn first_host(list: &str) -> Option<String> {
    let end = list.find(['[', ',']).unwrap_or(list.len());
    let (name, rest) = list.split_at(end);
    let host = match rest.strip_prefix('[') {
        Some(range) => {
            let number: String = range.chars().take_while(char::is_ascii_digit).collect();
            let after = range.find(']').map_or("", |at| &range[at + 1..]);
            let suffix: String = after.chars().take_while(|&c| c != ',' && c != '[').collect();
            format!("{name}{number}{suffix}")
        }
        None => name.to_owned(),
    };
    (!host.is_empty()).then_some(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(vars: &[(&str, &str)]) -> Result<Option<Environment>> {
        Environment::of(&|name| {
            vars.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn every_launcher_is_understood() {
        assert_eq!(of(&[]).unwrap(), None);
        let torch = [
            ("RANK", "5"),
            ("WORLD_SIZE", "16"),
            ("LOCAL_RANK", "1"),
            ("MASTER_ADDR", "n1"),
            ("MASTER_PORT", "29500"),
        ];
        let found = of(&torch).unwrap().unwrap();
        assert_eq!((found.place, found.local_rank), (Place { rank: 5, world: 16 }, 1));
        assert_eq!((found.address.as_str(), found.port, found.by), ("n1", 29_501, "torchrun"));
        let slurm = [
            ("SLURM_PROCID", "3"),
            ("SLURM_NTASKS", "8"),
            ("SLURM_LOCALID", "3"),
            ("SLURM_JOB_ID", "123456"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_STEP_NODELIST", "gpu-[007-008,011]"),
        ];
        let found = of(&slurm).unwrap().unwrap();
        assert_eq!((found.place.rank, found.address.as_str(), found.port), (3, "gpu-007", 23_456));
        // a batch script, which has no step, is no rank
        assert_eq!(
            of(&slurm.iter().copied().filter(|(key, _)| *key != "SLURM_STEP_ID").collect::<Vec<_>>())
                .unwrap(),
            None
        );
        let mpi = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ];
        let text = of(&mpi).unwrap_err().to_string();
        assert!(text.contains("MASTER_ADDR"), "{text}");
        let here =
            [&mpi[..], &[("OMPI_COMM_WORLD_LOCAL_SIZE", "2"), ("PMIX_NAMESPACE", "prterun-7")]].concat();
        let found = of(&here).unwrap().unwrap();
        assert_eq!((found.address.as_str(), found.local_world), ("127.0.0.1", Some(2)));
        // one process needs no others
        assert_eq!(of(&[("RANK", "0"), ("WORLD_SIZE", "1")]).unwrap(), None);
    }

    #[test]
    fn runs_of_different_jobs_have_different_tokens() {
        let token = |job: &str| {
            let vars = [
                ("SLURM_PROCID", "0"),
                ("SLURM_NTASKS", "2"),
                ("SLURM_LOCALID", "0"),
                ("SLURM_JOB_ID", job),
                ("SLURM_STEP_ID", "0"),
                ("SLURM_STEP_NODELIST", "a"),
            ];
            of(&vars).unwrap().unwrap().token
        };
        assert_ne!(token("1"), token("2"));
    }

    /// MPICH says nothing that tells two runs of one machine apart.
    #[test]
    fn a_run_without_a_name_needs_a_token() {
        let mpich =
            [("PMI_RANK", "1"), ("PMI_SIZE", "4"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "4")];
        let text = of(&mpich).unwrap_err().to_string();
        assert!(
            text.contains("mpiexec gives this run no name") && text.contains("IRONHORSE_TOKEN"),
            "{text}"
        );
        let with = |token| of(&[&mpich[..], &[("IRONHORSE_TOKEN", token)]].concat()).unwrap().unwrap();
        let [one, two] = ["a secret", "another"].map(with);
        assert_eq!(
            (one.token.as_str(), one.address.as_str(), one.local_world),
            ("a secret", "127.0.0.1", Some(4))
        );
        assert_ne!(one.port, two.port, "two runs of one machine do not meet at one port");
    }

    #[test]
    fn cores_are_shared_by_those_of_the_machine() {
        let torch = [("RANK", "0"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")];
        let local = |more: &[(&str, &str)]| of(&[&torch[..], more].concat()).unwrap().unwrap().local_world;
        assert_eq!([local(&[]), local(&[("LOCAL_WORLD_SIZE", "4")])], [None, Some(4)]);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (vars, text) in [
            (vec![("RANK", "x"), ("WORLD_SIZE", "2")], "RANK is `x`, expected a whole number"),
            (
                vec![("RANK", "2"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")],
                "rank 2 of 2",
            ),
            (vec![("RANK", "0"), ("WORLD_SIZE", "2")], "MASTER_ADDR is not set"),
        ] {
            let error = of(&vars).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
    }

    #[test]
    fn lists_of_hosts_are_read() {
        for (list, first) in [
            ("a", "a"),
            ("a,b", "a"),
            ("node[3-7]", "node3"),
            ("node[003,005-9],x", "node003"),
            ("r[1-2]n4,b", "r1n4"),
        ] {
            assert_eq!(first_host(list).as_deref(), Some(first));
        }
        assert_eq!(first_host(""), None);
    }
}
