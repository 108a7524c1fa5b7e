//! Names that need no owner: files outside the hub with their hashes, and models that the hub itself knows by one word.

/// A file outside the hub.
#[derive(Clone, Debug, serde::Deserialize, serde::Serialize)]
pub struct KnownFile {
    /// What it is called on the command line.
    pub name: String,
    /// Its name in the cache; the ending says what it holds.
    pub file: String,
    /// The address to download it from.
    pub address: String,
    /// Its size.
    pub bytes: u64,
    /// Its SHA-256, in hexadecimal digits.
    pub sha256: String,
    /// What it is.
    pub about: String,
}

/// The known files. Sizes and hashes of HellaSwag are those that TensorFlow Datasets states for it.
pub fn files() -> Vec<KnownFile> {
    let known =
        |name: &str, file: &str, address: &str, (bytes, sha256): (u64, &str), about: &str| KnownFile {
            name: name.into(),
            file: file.into(),
            address: address.into(),
            bytes,
            sha256: sha256.into(),
            about: about.into(),
        };
    vec![
        known(
            "tinyshakespeare",
            "tinyshakespeare.txt",
            "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            (1_115_394, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),
            "text, 40,000 lines of Shakespeare",
        ),
        known(
            "hellaswag",
            "hellaswag_val.jsonl",
            "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl",
            (12_246_618, "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"),
            "10,042 multiple-choice questions",
        ),
    ]
}

/// Models of one word, the repository they have moved to, and what they are.
pub const KNOWN_MODELS: [(&str, &str, &str); 4] = [
    ("gpt2", "openai-community/gpt2", "GPT-2 124M, weights and tokenizer"),
    ("gpt2-medium", "openai-community/gpt2-medium", "GPT-2 350M"),
    ("gpt2-large", "openai-community/gpt2-large", "GPT-2 774M"),
    ("gpt2-xl", "openai-community/gpt2-xl", "GPT-2 1558M"),
];
