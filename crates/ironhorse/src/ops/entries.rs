//! The table of eager ops. One entry gives the Rust function, the C function with its place in `ironhorse.h`, and the numpy
//! function with its signature and documentation. The grammar is that of [`super::define`].

/// Calls a macro with the whole table.
#[macro_export]
macro_rules! for_each_op {
    ($callback:ident) => {
        $callback! {
            /// out = x / (1 + e^-x), element by element.
            silu = cuda_silu(
                x: read [n],
                out: write [n] { .same(&["x"]) },
                n: count { .leading() },
            ) => Unary { op: UnaryFn::Silu, x, y: out, n };

            /// out = a + b, element by element.
            add = cuda_add(
                a: read [n],
                b: read [n],
                out: write [n] { .same(&["a", "b"]) },
                n: count { .leading() },
            ) => Binary { op: BinaryFn::Add, a, b, y: out, n };

            /// out = a * b, element by element.
            mul = cuda_mul(
                a: read [n],
                b: read [n],
                out: write [n] { .same(&["a", "b"]) },
                n: count { .leading() },
            ) => Binary { op: BinaryFn::Mul, a, b, y: out, n };

            /// out = x * scale, element by element.
            scale = cuda_scale(
                x: read [n],
                out: write [n] { .same(&["x"]) },
                scale: number,
                n: count { .leading() },
            ) => Unary { op: UnaryFn::Scale(scale.into()), x, y: out, n };

            /// out = x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2, element by element: GELU in its tanh form, GPT-2's,
            /// `approximate="tanh"` in PyTorch.
            gelu = cuda_gelu(
                x: read [n],
                out: write [n] { .same(&["x"]) },
                n: count { .leading() },
            ) => Unary { op: UnaryFn::Act(Act::Gelu), x, y: out, n };

            /// out = max(x, 0)^2, element by element: squared ReLU.
            relu2 = cuda_relu2(
                x: read [n],
                out: write [n] { .same(&["x"]) },
                n: count { .leading() },
            ) => Unary { op: UnaryFn::Act(Act::Relu2), x, y: out, n };

            /// out = silu(gate) * up, element by element.
            swiglu = cuda_swiglu(
                gate: read [n],
                up: read [n],
                out: write [n] { .same(&["gate", "up"]) },
                n: count { .leading() },
            ) => Binary { op: BinaryFn::Swiglu, a: gate, b: up, y: out, n };

            /// out = softmax(x) of each row. As in PyTorch, a row with NaN or +inf, or of -inf alone, becomes NaN.
            softmax = cuda_softmax(
                x: read [rows, cols],
                out: write [rows, cols] { .same(&["x"]) },
                rows: size { .leading() },
                cols: size,
            ) => Softmax { x, y: out, rows: Rows { rows, cols } };

            /// The choice of a router: softmax of each row, then its k largest, largest first, the lower index first among
            /// equals. `weights` are their probabilities divided by their sum, `idx` their columns. If the softmax of the
            /// row is NaN so are the weights; NaN counts as the largest.
            softmax_topk = cuda_softmax_topk(
                x: read [rows, cols],
                weights: write [rows, k],
                idx: write_i32 [rows, k],
                rows: size { .leading() },
                cols: size { .bound(Bound::Classes) },
                k: size { .bound(Bound::UpTo("cols")).or(Default::Required) },
            ) { .idle(&["weights"]) } => SoftmaxTopk { x, weights, indices: idx, rows: Rows { rows, cols }, k };

            /// out = x / sqrt(mean(x^2) + eps) * weight of each row.
            rmsnorm = cuda_rmsnorm(
                x: read [rows, dim],
                weight: read [dim],
                out: write [rows, dim] { .same(&["x"]) },
                rows: size { .leading() },
                dim: size,
                eps: number { .bound(Bound::NotNegative).number(1e-6) },
            ) => RmsNorm {
                x, weight, y: out, rstd: Array::none(Float::F32), rows: Rows { rows, cols: dim }, eps: eps.into(),
            };

            /// residual_out = x + residual; out = rmsnorm(residual_out). `out` and `residual_out` are never the same array.
            rmsnorm_residual = cuda_rmsnorm_residual(
                x: read [rows, dim],
                residual: read [rows, dim],
                weight: read [dim],
                out: write [rows, dim] { .same(&["x", "residual"]) },
                residual_out: write [rows, dim] { .same(&["x", "residual"]) },
                rows: size { .leading() },
                dim: size,
                eps: number { .bound(Bound::NotNegative).number(1e-6) },
            ) => ResidualRmsNorm {
                x, residual, weight, y: out, sum: residual_out, rows: Rows { rows, cols: dim }, eps: eps.into(),
            };

            /// out = (x - mean) / sqrt(var + eps) * weight + bias of each row; var is divided by dim.
            layernorm = cuda_layernorm(
                x: read [rows, dim],
                weight: read [dim],
                bias: read [dim],
                out: write [rows, dim] { .same(&["x"]) },
                rows: size { .leading() },
                dim: size,
                eps: number { .bound(Bound::NotNegative).number(1e-5) },
            ) => LayerNorm {
                x, weight, bias, y: out, mean: Array::none(Float::F32), rstd: Array::none(Float::F32),
                rows: Rows { rows, cols: dim }, eps: eps.into(),
            };

            /// c = alpha a b + beta c. With beta = 0 the old c is not read; with alpha = 0 neither are a and b.
            gemm = cuda_gemm(
                a: read [m, k],
                b: read [k, n],
                c: write [m, n] { .reads_unless("beta") },
                m: size,
                n: size,
                k: size,
                alpha: number { .number(1.0) },
                beta: number { .number(0.0) },
            ) { .idle(&["c"]) } => Gemm {
                a, b, c,
                shape: GemmShape { batch: 1, m, n, k, alpha, beta, transpose_a: false, transpose_b: false },
            };

            /// gemm of each of `batch` triples of matrices that follow each other in memory.
            gemm_batched = cuda_gemm_batched(
                a: read [batch, m, k],
                b: read [batch, k, n],
                c: write [batch, m, n] { .reads_unless("beta") },
                batch: size,
                m: size,
                n: size,
                k: size,
                alpha: number { .number(1.0) },
                beta: number { .number(0.0) },
            ) { .idle(&["c"]) } => Gemm {
                a, b, c,
                shape: GemmShape { batch, m, n, k, alpha, beta, transpose_a: false, transpose_b: false },
            };

            /// The angles of rotary embedding: freqs[p, i] = p / (base alpha^(d / (d - 2)))^(2 i / d) at position p, with
            /// d = head_dim. alpha is the NTK factor, 1 for none. Computed in double precision and rounded once.
            rope_freqs = cuda_rope_freqs(
                freqs: write [max_seq, (head_dim / 2)],
                max_seq: size { .or(Default::Required) },
                head_dim: size { .bound(Bound::Even).or(Default::Required) },
                base: number { .bound(Bound::Positive).number(10000.0) },
                alpha: number { .bound(Bound::Positive).number(1.0) },
            ) => RopeFreqs {
                freqs: freqs.at.cast(), positions: max_seq, head_dim, base: RopeFreqs::base(head_dim, base, alpha),
            };

            /// x with elements 2i and 2i + 1 of each head rotated by the angle freqs[offset + s, i] at position s:
            /// (a cos - b sin, a sin + b cos), as in LLaMA. `freqs` is a table of rope_freqs; `offset` is how many positions
            /// a cache holds already.
            rope_forward = cuda_rope_forward(
                x: read [batch, seq, heads, head_dim],
                freqs: read [(offset + seq), (head_dim / 2)],
                out: write [batch, seq, heads, head_dim] { .same(&["x"]) },
                batch: size,
                seq: size,
                heads: size,
                head_dim: size { .bound(Bound::Even) },
                offset: size { .or(Default::Int(0)) },
            ) { .python(Python::Switch("half", &rope_forward_half)) } => RopeAngles {
                x, angles: freqs.at.cast(), y: out, offset,
                shape: RopeShape { batch, seq, heads, head_dim, pairs: Pairs::Interleaved },
            };

            /// rope_forward with elements i and i + head_dim / 2 rotated together (GPT-NeoX, Hugging Face).
            rope_forward_half = cuda_rope_forward_half(
                x: read [batch, seq, heads, head_dim],
                freqs: read [(offset + seq), (head_dim / 2)],
                out: write [batch, seq, heads, head_dim] { .same(&["x"]) },
                batch: size,
                seq: size,
                heads: size,
                head_dim: size { .bound(Bound::Even) },
                offset: size { .or(Default::Int(0)) },
            ) { .python(Python::Hidden) } => RopeAngles {
                x, angles: freqs.at.cast(), y: out, offset,
                shape: RopeShape { batch, seq, heads, head_dim, pairs: Pairs::Halves },
            };

            /// rope_forward of q and of k, which may have fewer heads.
            rope_qk = cuda_rope_qk(
                q: read [batch, seq, q_heads, head_dim],
                k: read [batch, seq, kv_heads, head_dim],
                freqs: read [(offset + seq), (head_dim / 2)],
                q_out: write [batch, seq, q_heads, head_dim] { .same(&["q"]) },
                k_out: write [batch, seq, kv_heads, head_dim] { .same(&["k"]) },
                batch: size,
                seq: size,
                q_heads: size,
                kv_heads: size,
                head_dim: size { .bound(Bound::Even) },
                offset: size { .or(Default::Int(0)) },
            ) { .python(Python::Switch("half", &rope_qk_half)).idle(&["q", "k"]) } => RopeQk {
                q: RopeAngles {
                    x: q, angles: freqs.at.cast(), y: q_out, offset,
                    shape: RopeShape { batch, seq, heads: q_heads, head_dim, pairs: Pairs::Interleaved },
                },
                k: RopeAngles {
                    x: k, angles: freqs.at.cast(), y: k_out, offset,
                    shape: RopeShape { batch, seq, heads: kv_heads, head_dim, pairs: Pairs::Interleaved },
                },
            };

            /// rope_qk with elements i and i + head_dim / 2 rotated together.
            rope_qk_half = cuda_rope_qk_half(
                q: read [batch, seq, q_heads, head_dim],
                k: read [batch, seq, kv_heads, head_dim],
                freqs: read [(offset + seq), (head_dim / 2)],
                q_out: write [batch, seq, q_heads, head_dim] { .same(&["q"]) },
                k_out: write [batch, seq, kv_heads, head_dim] { .same(&["k"]) },
                batch: size,
                seq: size,
                q_heads: size,
                kv_heads: size,
                head_dim: size { .bound(Bound::Even) },
                offset: size { .or(Default::Int(0)) },
            ) { .python(Python::Hidden).idle(&["q", "k"]) } => RopeQk {
                q: RopeAngles {
                    x: q, angles: freqs.at.cast(), y: q_out, offset,
                    shape: RopeShape { batch, seq, heads: q_heads, head_dim, pairs: Pairs::Halves },
                },
                k: RopeAngles {
                    x: k, angles: freqs.at.cast(), y: k_out, offset,
                    shape: RopeShape { batch, seq, heads: kv_heads, head_dim, pairs: Pairs::Halves },
                },
            };

            /// out = softmax(scale q k^T) v of each sequence and head. With `causal`, position i sees positions up to i only.
            /// The usual scale is 1 / sqrt(head_dim).
            flash_attention = cuda_flash_attention(
                q: read [batch, seq, heads, head_dim],
                k: read [batch, seq, heads, head_dim],
                v: read [batch, seq, heads, head_dim],
                out: write [batch, seq, heads, head_dim],
                batch: size,
                seq: size,
                heads: size,
                head_dim: size,
                scale: number,
                causal: flag,
            ) { .python(Python::Hidden) } => Attention {
                q, k, v, out, lse: Array::none(Float::F32),
                shape: AttentionShape::position_major([batch, seq, seq], [heads, heads], head_dim, (scale.into(), causal)),
            };

            /// out = softmax(scale q k^T) v of each sequence and head, in memory that does not grow with the square of the
            /// length. k and v may have fewer heads than q: query head h uses key head h / (heads / kv_heads). With `causal`,
            /// query i sees keys up to kv_len - seq + i: the last query sees all. A query that sees no key gets zeros.
            attention = cuda_attention(
                q: read [batch, seq, heads, head_dim],
                k: read [batch, kv_len, kv_heads, head_dim],
                v: read [batch, kv_len, kv_heads, head_dim],
                out: write [batch, seq, heads, head_dim],
                batch: size,
                seq: size,
                kv_len: size { .or(Default::Hidden("seq")) },
                heads: size,
                kv_heads: size { .bound(Bound::Divides("heads")).or(Default::Hidden("heads")) },
                head_dim: size,
                scale: number { .or(Default::InverseRoot("head_dim")) },
                causal: flag { .or(Default::Flag(true)) },
            ) { .also("flash_attention") } => Attention {
                q, k, v, out, lse: Array::none(Float::F32),
                shape: AttentionShape::position_major(
                    [batch, seq, kv_len], [heads, kv_heads], head_dim, (scale.into(), causal),
                ),
            };

            /// log_probs = log softmax(logits) of each row, and loss = the mean over the rows of -log_probs at the targets
            /// (`reduction="mean"` in PyTorch). Nothing is done without rows. On a device a target that is out of range
            /// makes the loss NaN.
            cross_entropy_forward = cuda_cross_entropy_forward(
                logits: read [rows, vocab],
                targets: read_i32 [rows] { .below("vocab") },
                loss: write [] { .fill(f32::NAN) },
                log_probs: write [rows, vocab] { .same(&["logits"]) },
                rows: size { .leading() },
                vocab: size { .bound(Bound::Classes) },
            ) { .idle(&["targets"]) } => LogProbs { logits, targets, loss, log_probs, rows: Rows { rows, cols: vocab } };

            /// d_logits = (e^log_probs - onehot(targets)) * scale, from the log_probs of cross_entropy_forward. The gradient
            /// of its mean loss has scale 1 / rows. On a device the row of a target that is out of range becomes NaN.
            cross_entropy_backward = cuda_cross_entropy_backward(
                log_probs: read [rows, vocab],
                targets: read_i32 [rows] { .below("vocab") },
                d_logits: write [rows, vocab] { .same(&["log_probs"]) },
                rows: size { .leading() },
                vocab: size { .bound(Bound::Classes) },
                scale: number { .or(Default::Inverse("rows")) },
            ) { .idle(&["targets"]) } => LogProbsBwd {
                log_probs, targets, d_logits, rows: Rows { rows, cols: vocab }, scale: scale.into(),
            };

            /// The load-balancing loss of a router: f_counts[e] = share of the rows sent to expert e (a row that names e
            /// twice counts once), p_means[e] = mean of probs[:, e], aux = alpha * experts * sum(f_counts * p_means). Even
            /// routing gives alpha * k. Nothing is done without rows. On a device an index out of range is not counted.
            aux_loss_forward = cuda_aux_loss_forward(
                probs: read [rows, experts],
                idx: read_i32 [rows, k] { .below("experts") },
                aux: write [] { .fill(0.0) },
                f_counts: write [experts] { .fill(0.0) },
                p_means: write [experts] { .fill(0.0) },
                rows: size { .leading() },
                experts: size,
                k: size,
                alpha: number { .number(0.01) },
            ) { .also("aux_loss") } => AuxLoss {
                probs, chosen: idx, loss: aux, fractions: f_counts, means: p_means, tokens: rows, experts, k,
                alpha: alpha.into(),
            };

            /// One step of PyTorch's AdamW: param *= 1 - lr weight_decay; m = beta1 m + (1 - beta1) grad; v = beta2 v +
            /// (1 - beta2) grad^2; param -= lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps). `step`
            /// counts from 1.
            adamw_step = cuda_adamw_step(
                param: update [n],
                grad: read [n],
                m: update [n],
                v: update [n],
                lr: number { .bound(Bound::NotNegative) },
                beta1: number { .bound(Bound::Decay).number(0.9) },
                beta2: number { .bound(Bound::Decay).number(0.999) },
                eps: number { .bound(Bound::NotNegative).number(1e-8) },
                weight_decay: number { .bound(Bound::NotNegative).number(0.0) },
                step: int { .bound(Bound::FromOne).or(Default::Int(1)) },
                n: count { .leading().first() },
            ) => AdamWStep {
                param: param.at.cast(), grad: grad.at.cast(), m: m.at.cast(), v: v.at.cast(), n,
                lr, beta1, beta2, eps, weight_decay, step,
            };

            /// grad = 0.
            zero_grad = cuda_zero_grad(
                grad: update [n],
                n: count { .leading().first() },
            ) => ZeroGrad { grad: grad.at.cast(), n };

            /// total_norm = sqrt(sum(grad^2)); if that is more than `clip`, grad is multiplied by clip / (total_norm + 1e-6),
            /// as PyTorch's clip_grad_norm_ does. A norm of NaN makes every gradient NaN. `partial` is not used and may be
            /// null: sums are double, in memory of the library.
            grad_clip = cuda_grad_clip(
                grad: update [n],
                partial: unused,
                total_norm: write [],
                clip: number { .bound(Bound::NotNegative).number(1.0) },
                n: count { .leading().first() },
            ) { .idle(&["total_norm"]) } => GradClip {
                grad: grad.at.cast(), total_norm: total_norm.at.cast(), clip, n,
            };

            /// grad_weight[idx[i]] += grad_out[i] for each i in order: the gradient of an embedding table, which has more
            /// rows than the largest index; cuda_scatter_add_rows checks that. On a device a negative index is skipped, and
            /// many equal indices are added up in parts, always in the same order.
            scatter_add = cuda_scatter_add(
                grad_out: read [n_idx, dim],
                idx: read_i32 [n_idx] { .below("") },
                grad_weight: update [(above idx), dim],
                n_idx: size,
                dim: size,
            ) { .python(Python::Hidden) } => ScatterAdd {
                rows: grad_out.at.cast(), indices: idx, table: grad_weight.at.cast(), n: n_idx, width: dim,
                table_rows: None,
            };

            /// grad_weight[idx[i]] += grad_out[i] for each i in order: the gradient of an embedding table. On a device an
            /// index that is out of range is skipped, and many equal indices are added up in parts, always in the same order.
            scatter_add_rows = cuda_scatter_add_rows(
                grad_out: read [n_idx, dim],
                idx: read_i32 [n_idx] { .below("rows") },
                grad_weight: update [rows, dim],
                n_idx: size { .leading() },
                dim: size,
                rows: size { .or(Default::Hidden("n_idx")) },
            ) { .python(Python::Named("scatter_add")) } => ScatterAdd {
                rows: grad_out.at.cast(), indices: idx, table: grad_weight.at.cast(), n: n_idx, width: dim,
                table_rows: Some(rows),
            };

            /// out = the column of the largest of each row, the lowest among equals, the first NaN if there is one.
            argmax = cuda_argmax(
                logits: read [rows, vocab],
                out: write_i32 [rows],
                rows: size { .leading() },
                vocab: size { .bound(Bound::Classes) },
            ) { .idle(&["out"]) } => Argmax { logits, out, rows: Rows { rows, cols: vocab } };

            /// out = a column of each row, drawn from softmax(logits / temperature); a temperature of 0 takes the largest,
            /// and -inf is never drawn. The random number of a row is the first output of SplitMix64 in the state of its
            /// seed, the upper 53 bits divided by 2^53: equal seeds, equal columns, on every machine. A row with NaN or +inf,
            /// or of -inf alone, is an error, and gives -1 on a device.
            sample = cuda_sample(
                logits: read [rows, vocab],
                out: write_i32 [rows],
                seeds: seeds [rows] { .or(Default::Seeds) },
                rows: size { .leading() },
                vocab: size { .bound(Bound::Classes) },
                temperature: number { .bound(Bound::Temperature).number(1.0) },
            ) { .idle(&["out"]) } => Sample {
                logits, seeds, out, rows: Rows { rows, cols: vocab }, temperature, top_k: None, top_p: None,
            };

            /// sample from the k largest of each row only, and those that tie with the k-th.
            topk_sample = cuda_topk_sample(
                logits: read [rows, vocab],
                out: write_i32 [rows],
                seeds: seeds [rows] { .or(Default::Seeds) },
                rows: size { .leading() },
                vocab: size { .bound(Bound::Classes) },
                k: size { .bound(Bound::FromOne).or(Default::Int(50)) },
                temperature: number { .bound(Bound::Temperature).number(1.0) },
            ) { .idle(&["out"]) } => Sample {
                logits, seeds, out, rows: Rows { rows, cols: vocab }, temperature, top_k: Some(k), top_p: None,
            };

            /// sample from the smallest set of the largest of each row that together have at least the probability p, after
            /// the temperature.
            topp_sample = cuda_topp_sample(
                logits: read [rows, vocab],
                out: write_i32 [rows],
                seeds: seeds [rows] { .or(Default::Seeds) },
                rows: size { .leading() },
                vocab: size { .bound(Bound::Classes) },
                p: number { .bound(Bound::Share).number(0.9).alias("top_p") },
                temperature: number { .bound(Bound::Temperature).number(1.0) },
            ) { .idle(&["out"]) } => Sample {
                logits, seeds, out, rows: Rows { rows, cols: vocab }, temperature, top_k: None, top_p: Some(p),
            };
        }
    };
}
