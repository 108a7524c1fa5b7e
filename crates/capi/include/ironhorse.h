/* ironhorse: eager transformer ops for C and every language that can call C.
 *
 * Every cuda_* function works on contiguous row-major float arrays and returns a code:
 *
 *   IH_SUCCESS, IH_NOT_AVAILABLE, IH_INVALID_VALUE, IH_LAUNCH_FAILED, IH_OUT_OF_MEMORY
 *
 * ih_last_error() says in words what was wrong. Null pointers, negative sizes, sizes that overflow, indices out of range
 * and arrays that overlap are IH_INVALID_VALUE; nothing is written then. Arrays without elements may be null, and
 * nothing is done. Results have the same bits for any number of threads; functions may be called from several threads.
 *
 * Host pointers run on the CPU, on all cores, and the call returns when it is done. Device pointers run on their GPU: the
 * call puts the work on `stream` (a CUDA stream of that GPU; NULL is the default stream) and returns. All pointers of a
 * call are of one place. For host pointers `stream` is ignored. Device memory cannot be read before the call: an index
 * out of range is skipped or gives NaN there, and reaches no other memory.
 *
 * Link with -lironhorse; the static library needs -lpthread -ldl -lm too.
 *
 * The part below "ops" is generated from the table of ops by `cargo xtask generate`: do not edit it.
 */

#ifndef IRONHORSE_H
#define IRONHORSE_H

#include <stdint.h>

/*
 Done.
 */
#define IH_SUCCESS 0

/*
 The device the memory is on cannot be used.
 */
#define IH_NOT_AVAILABLE -1

/*
 An argument is invalid; ih_last_error() names it.
 */
#define IH_INVALID_VALUE -2

/*
 The computation could not be started, or failed.
 */
#define IH_LAUNCH_FAILED -3

/*
 There is not enough memory.
 */
#define IH_OUT_OF_MEMORY -4

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 What was wrong with the last call of this thread that failed; an empty text if none did. The text is valid until the next
 call of this thread that fails.
 */
const char *ih_last_error(void);

/*
 The version of the library, as in "0.1.0".
 */
const char *ih_version(void);

/*
 1 if the functions can run on a CUDA device, for its memory; 0 if they run on the host only.
 */
int ih_cuda_available(void);

/*
 Sets how many threads large calls may use, in the whole process; 0, the default, means one for each core. Results do not
 depend on it. A negative number is IH_INVALID_VALUE.
 */
int32_t ih_set_threads(int threads);

/* ops */

/*
 out = x / (1 + e^-x), element by element.

 Read: `x` [n]. Written: `out` [n] (may be `x`).
 */
int32_t cuda_silu(const float *x, float *out, int64_t n, void *stream);

/*
 out = a + b, element by element.

 Read: `a` [n], `b` [n]. Written: `out` [n] (may be `a` or `b`).
 */
int32_t cuda_add(const float *a, const float *b, float *out, int64_t n, void *stream);

/*
 out = a * b, element by element.

 Read: `a` [n], `b` [n]. Written: `out` [n] (may be `a` or `b`).
 */
int32_t cuda_mul(const float *a, const float *b, float *out, int64_t n, void *stream);

/*
 out = x * scale, element by element.

 Read: `x` [n]. Written: `out` [n] (may be `x`).
 */
int32_t cuda_scale(const float *x, float *out, float scale, int64_t n, void *stream);

/*
 out = x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2, element by element: GELU in its tanh form, GPT-2's,
 `approximate="tanh"` in PyTorch.

 Read: `x` [n]. Written: `out` [n] (may be `x`).
 */
int32_t cuda_gelu(const float *x, float *out, int64_t n, void *stream);

/*
 out = max(x, 0)^2, element by element: squared ReLU.

 Read: `x` [n]. Written: `out` [n] (may be `x`).
 */
int32_t cuda_relu2(const float *x, float *out, int64_t n, void *stream);

/*
 out = silu(gate) * up, element by element.

 Read: `gate` [n], `up` [n]. Written: `out` [n] (may be `gate` or `up`).
 */
int32_t cuda_swiglu(const float *gate, const float *up, float *out, int64_t n, void *stream);

/*
 out = softmax(x) of each row. As in PyTorch, a row with NaN or +inf, or of -inf alone, becomes NaN.

 Read: `x` [rows, cols]. Written: `out` [rows, cols] (may be `x`).
 */
int32_t cuda_softmax(const float *x, float *out, int rows, int cols, void *stream);

/*
 The choice of a router: softmax of each row, then its k largest, largest first, the lower index first among
 equals. `weights` are their probabilities divided by their sum, `idx` their columns. If the softmax of the
 row is NaN so are the weights; NaN counts as the largest.

 Read: `x` [rows, cols]. Written: `weights` [rows, k], `idx` [rows, k]. `cols` is at least 1 and below 2^31.
 `k` is at most `cols`.
 */
int32_t cuda_softmax_topk(const float *x,
                          float *weights,
                          int32_t *idx,
                          int rows,
                          int cols,
                          int k,
                          void *stream);

/*
 out = x / sqrt(mean(x^2) + eps) * weight of each row.

 Read: `x` [rows, dim], `weight` [dim]. Written: `out` [rows, dim] (may be `x`). `eps` is at least 0.
 */
int32_t cuda_rmsnorm(const float *x,
                     const float *weight,
                     float *out,
                     int rows,
                     int dim,
                     float eps,
                     void *stream);

/*
 residual_out = x + residual; out = rmsnorm(residual_out). `out` and `residual_out` are never the same array.

 Read: `x` [rows, dim], `residual` [rows, dim], `weight` [dim]. Written: `out` [rows, dim] (may be `x` or
 `residual`), `residual_out` [rows, dim] (may be `x` or `residual`). `eps` is at least 0.
 */
int32_t cuda_rmsnorm_residual(const float *x,
                              const float *residual,
                              const float *weight,
                              float *out,
                              float *residual_out,
                              int rows,
                              int dim,
                              float eps,
                              void *stream);

/*
 out = (x - mean) / sqrt(var + eps) * weight + bias of each row; var is divided by dim.

 Read: `x` [rows, dim], `weight` [dim], `bias` [dim]. Written: `out` [rows, dim] (may be `x`). `eps` is at
 least 0.
 */
int32_t cuda_layernorm(const float *x,
                       const float *weight,
                       const float *bias,
                       float *out,
                       int rows,
                       int dim,
                       float eps,
                       void *stream);

/*
 c = alpha a b + beta c. With beta = 0 the old c is not read; with alpha = 0 neither are a and b.

 Read: `a` [m, k], `b` [k, n]. Written: `c` [m, n].
 */
int32_t cuda_gemm(const float *a,
                  const float *b,
                  float *c,
                  int m,
                  int n,
                  int k,
                  float alpha,
                  float beta,
                  void *stream);

/*
 gemm of each of `batch` triples of matrices that follow each other in memory.

 Read: `a` [batch, m, k], `b` [batch, k, n]. Written: `c` [batch, m, n].
 */
int32_t cuda_gemm_batched(const float *a,
                          const float *b,
                          float *c,
                          int batch,
                          int m,
                          int n,
                          int k,
                          float alpha,
                          float beta,
                          void *stream);

/*
 The angles of rotary embedding: freqs[p, i] = p / (base alpha^(d / (d - 2)))^(2 i / d) at position p, with d
 = head_dim. alpha is the NTK factor, 1 for none. Computed in double precision and rounded once.

 Written: `freqs` [max_seq, head_dim / 2]. `head_dim` is an even number. `base` is a finite number above 0.
 `alpha` is a finite number above 0.
 */
int32_t cuda_rope_freqs(float *freqs, int max_seq, int head_dim, float base, float alpha, void *stream);

/*
 x with elements 2i and 2i + 1 of each head rotated by the angle freqs[offset + s, i] at position s: (a cos -
 b sin, a sin + b cos), as in LLaMA. `freqs` is a table of rope_freqs; `offset` is how many positions a cache
 holds already.

 Read: `x` [batch, seq, heads, head_dim], `freqs` [at least offset + seq, head_dim / 2]. Written: `out`
 [batch, seq, heads, head_dim] (may be `x`). `head_dim` is an even number.
 */
int32_t cuda_rope_forward(const float *x,
                          const float *freqs,
                          float *out,
                          int batch,
                          int seq,
                          int heads,
                          int head_dim,
                          int offset,
                          void *stream);

/*
 rope_forward with elements i and i + head_dim / 2 rotated together (GPT-NeoX, Hugging Face).

 Read: `x` [batch, seq, heads, head_dim], `freqs` [at least offset + seq, head_dim / 2]. Written: `out`
 [batch, seq, heads, head_dim] (may be `x`). `head_dim` is an even number.
 */
int32_t cuda_rope_forward_half(const float *x,
                               const float *freqs,
                               float *out,
                               int batch,
                               int seq,
                               int heads,
                               int head_dim,
                               int offset,
                               void *stream);

/*
 rope_forward of q and of k, which may have fewer heads.

 Read: `q` [batch, seq, q_heads, head_dim], `k` [batch, seq, kv_heads, head_dim], `freqs` [at least offset +
 seq, head_dim / 2]. Written: `q_out` [batch, seq, q_heads, head_dim] (may be `q`), `k_out` [batch, seq,
 kv_heads, head_dim] (may be `k`). `head_dim` is an even number.
 */
int32_t cuda_rope_qk(const float *q,
                     const float *k,
                     const float *freqs,
                     float *q_out,
                     float *k_out,
                     int batch,
                     int seq,
                     int q_heads,
                     int kv_heads,
                     int head_dim,
                     int offset,
                     void *stream);

/*
 rope_qk with elements i and i + head_dim / 2 rotated together.

 Read: `q` [batch, seq, q_heads, head_dim], `k` [batch, seq, kv_heads, head_dim], `freqs` [at least offset +
 seq, head_dim / 2]. Written: `q_out` [batch, seq, q_heads, head_dim] (may be `q`), `k_out` [batch, seq,
 kv_heads, head_dim] (may be `k`). `head_dim` is an even number.
 */
int32_t cuda_rope_qk_half(const float *q,
                          const float *k,
                          const float *freqs,
                          float *q_out,
                          float *k_out,
                          int batch,
                          int seq,
                          int q_heads,
                          int kv_heads,
                          int head_dim,
                          int offset,
                          void *stream);

/*
 out = softmax(scale q k^T) v of each sequence and head. With `causal`, position i sees positions up to i
 only. The usual scale is 1 / sqrt(head_dim).

 Read: `q` [batch, seq, heads, head_dim], `k` [batch, seq, heads, head_dim], `v` [batch, seq, heads,
 head_dim]. Written: `out` [batch, seq, heads, head_dim].
 */
int32_t cuda_flash_attention(const float *q,
                             const float *k,
                             const float *v,
                             float *out,
                             int batch,
                             int seq,
                             int heads,
                             int head_dim,
                             float scale,
                             int causal,
                             void *stream);

/*
 out = softmax(scale q k^T) v of each sequence and head, in memory that does not grow with the square of the
 length. k and v may have fewer heads than q: query head h uses key head h / (heads / kv_heads). With
 `causal`, query i sees keys up to kv_len - seq + i: the last query sees all. A query that sees no key gets
 zeros.

 Read: `q` [batch, seq, heads, head_dim], `k` [batch, kv_len, kv_heads, head_dim], `v` [batch, kv_len,
 kv_heads, head_dim]. Written: `out` [batch, seq, heads, head_dim]. `kv_heads` is a divisor of `heads`.
 */
int32_t cuda_attention(const float *q,
                       const float *k,
                       const float *v,
                       float *out,
                       int batch,
                       int seq,
                       int kv_len,
                       int heads,
                       int kv_heads,
                       int head_dim,
                       float scale,
                       int causal,
                       void *stream);

/*
 log_probs = log softmax(logits) of each row, and loss = the mean over the rows of -log_probs at the targets
 (`reduction="mean"` in PyTorch). Nothing is done without rows. On a device a target that is out of range
 makes the loss NaN.

 Read: `logits` [rows, vocab], `targets` [rows], each in 0..vocab. Written: `loss` [1], `log_probs` [rows,
 vocab] (may be `logits`). `vocab` is at least 1 and below 2^31.
 */
int32_t cuda_cross_entropy_forward(const float *logits,
                                   const int32_t *targets,
                                   float *loss,
                                   float *log_probs,
                                   int rows,
                                   int vocab,
                                   void *stream);

/*
 d_logits = (e^log_probs - onehot(targets)) * scale, from the log_probs of cross_entropy_forward. The gradient
 of its mean loss has scale 1 / rows. On a device the row of a target that is out of range becomes NaN.

 Read: `log_probs` [rows, vocab], `targets` [rows], each in 0..vocab. Written: `d_logits` [rows, vocab] (may
 be `log_probs`). `vocab` is at least 1 and below 2^31.
 */
int32_t cuda_cross_entropy_backward(const float *log_probs,
                                    const int32_t *targets,
                                    float *d_logits,
                                    int rows,
                                    int vocab,
                                    float scale,
                                    void *stream);

/*
 The load-balancing loss of a router: f_counts[e] = share of the rows sent to expert e (a row that names e
 twice counts once), p_means[e] = mean of probs[:, e], aux = alpha * experts * sum(f_counts * p_means). Even
 routing gives alpha * k. Nothing is done without rows. On a device an index out of range is not counted.

 Read: `probs` [rows, experts], `idx` [rows, k], each in 0..experts. Written: `aux` [1], `f_counts` [experts],
 `p_means` [experts].
 */
int32_t cuda_aux_loss_forward(const float *probs,
                              const int32_t *idx,
                              float *aux,
                              float *f_counts,
                              float *p_means,
                              int rows,
                              int experts,
                              int k,
                              float alpha,
                              void *stream);

/*
 One step of PyTorch's AdamW: param *= 1 - lr weight_decay; m = beta1 m + (1 - beta1) grad; v = beta2 v + (1 -
 beta2) grad^2; param -= lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps). `step` counts
 from 1.

 Read: `grad` [n]. Written: `param` [n], `m` [n], `v` [n]. `lr` is at least 0. `beta1` is at least 0 and below
 1. `beta2` is at least 0 and below 1. `eps` is at least 0. `weight_decay` is at least 0. `step` is at least
 1.
 */
int32_t cuda_adamw_step(float *param,
                        const float *grad,
                        float *m,
                        float *v,
                        float lr,
                        float beta1,
                        float beta2,
                        float eps,
                        float weight_decay,
                        int step,
                        int64_t n,
                        void *stream);

/*
 grad = 0.

 Written: `grad` [n].
 */
int32_t cuda_zero_grad(float *grad, int64_t n, void *stream);

/*
 total_norm = sqrt(sum(grad^2)); if that is more than `clip`, grad is multiplied by clip / (total_norm +
 1e-6), as PyTorch's clip_grad_norm_ does. A norm of NaN makes every gradient NaN. `partial` is not used and
 may be null: sums are double, in memory of the library.

 Written: `grad` [n], `total_norm` [1]. `clip` is at least 0.
 */
int32_t cuda_grad_clip(float *grad, float *partial, float *total_norm, float clip, int64_t n, void *stream);

/*
 grad_weight[idx[i]] += grad_out[i] for each i in order: the gradient of an embedding table, which has more
 rows than the largest index; cuda_scatter_add_rows checks that. On a device a negative index is skipped, and
 many equal indices are added up in parts, always in the same order.

 Read: `grad_out` [n_idx, dim], `idx` [n_idx], at least 0. Written: `grad_weight` [more than the largest idx,
 dim].
 */
int32_t cuda_scatter_add(const float *grad_out,
                         const int32_t *idx,
                         float *grad_weight,
                         int n_idx,
                         int dim,
                         void *stream);

/*
 grad_weight[idx[i]] += grad_out[i] for each i in order: the gradient of an embedding table. On a device an
 index that is out of range is skipped, and many equal indices are added up in parts, always in the same
 order.

 Read: `grad_out` [n_idx, dim], `idx` [n_idx], each in 0..rows. Written: `grad_weight` [rows, dim].
 */
int32_t cuda_scatter_add_rows(const float *grad_out,
                              const int32_t *idx,
                              float *grad_weight,
                              int n_idx,
                              int dim,
                              int rows,
                              void *stream);

/*
 out = the column of the largest of each row, the lowest among equals, the first NaN if there is one.

 Read: `logits` [rows, vocab]. Written: `out` [rows]. `vocab` is at least 1 and below 2^31.
 */
int32_t cuda_argmax(const float *logits, int32_t *out, int rows, int vocab, void *stream);

/*
 out = a column of each row, drawn from softmax(logits / temperature); a temperature of 0 takes the largest,
 and -inf is never drawn. The random number of a row is the first output of SplitMix64 in the state of its
 seed, the upper 53 bits divided by 2^53: equal seeds, equal columns, on every machine. A row with NaN or
 +inf, or of -inf alone, is an error, and gives -1 on a device.

 Read: `logits` [rows, vocab], `seeds` [rows]. Written: `out` [rows]. `vocab` is at least 1 and below 2^31.
 `temperature` is a finite number, at least 0.
 */
int32_t cuda_sample(const float *logits,
                    int32_t *out,
                    const uint64_t *seeds,
                    int rows,
                    int vocab,
                    float temperature,
                    void *stream);

/*
 sample from the k largest of each row only, and those that tie with the k-th.

 Read: `logits` [rows, vocab], `seeds` [rows]. Written: `out` [rows]. `vocab` is at least 1 and below 2^31.
 `k` is at least 1. `temperature` is a finite number, at least 0.
 */
int32_t cuda_topk_sample(const float *logits,
                         int32_t *out,
                         const uint64_t *seeds,
                         int rows,
                         int vocab,
                         int k,
                         float temperature,
                         void *stream);

/*
 sample from the smallest set of the largest of each row that together have at least the probability p, after
 the temperature.

 Read: `logits` [rows, vocab], `seeds` [rows]. Written: `out` [rows]. `vocab` is at least 1 and below 2^31.
 `p` is above 0 and at most 1. `temperature` is a finite number, at least 0.
 */
int32_t cuda_topp_sample(const float *logits,
                         int32_t *out,
                         const uint64_t *seeds,
                         int rows,
                         int vocab,
                         float p,
                         float temperature,
                         void *stream);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* IRONHORSE_H */
