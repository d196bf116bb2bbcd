// The C interface: every function that Python or another op calls, and the structures that they take, declared once.
//
// Owns the signatures; quire_kernels/cpu/signatures.py mirrors them. Promises: whatever defines or calls one of these
// includes this file, so that a changed argument does not compile. Must not know: how an op computes.
#pragma once

#include <cstdint>

#include "attention/attention.h"
#include "gemm/experts.h"
#include "gemm/gemm.h"
#include "gemm/low_rank.h"
#include "gemm/norm.h"
#include "runtime/ranks.h"
#include "simd/bf16.h"
#include "weights/linear.h"
#include "weights/source.h"

// Before every function that Python calls, where it is declared and where it is defined: a definition that differs from
// its declaration is then an error, and no overload.
#define QUIRE_API extern "C" __attribute__((visibility("default")))

namespace quire {

struct Context;

// One op of a layer program. The rows that ops read and write: x, the residual stream; wide, the last projection from
// x; q, the rotated queries; mixed, attention's output; y, a projection that is normed before it is added to x; held, a
// sum of such, which is normed again.
enum class LayerOpKind : int32_t {
  kNormLinear = 0,    // wide = weight of the normed x; a gate-up pair with its activation
  kRopeWrite = 1,     // q from wide; keys and values to the pool
  kKeepSampled = 2,   // from here on q and x are the sample rows alone
  kAttend = 3,        // mixed from q
  kAddMixed = 4,      // x += scale * weight of mixed
  kAddWide = 5,       // x += scale * weight of wide
  kProjectMixed = 6,  // y = weight of mixed
  kProjectWide = 7,   // y = weight of wide
  kNormAdd = 8,       // x = (x + the normed y) * scale
  kAddExperts = 9,    // x += scale * the experts of the normed x
  kMixExperts = 10,   // y = the experts of the normed x
  kGateMixed = 11,    // mixed *= sigmoid(weight of the normed x); what q holds is gone
  kGateWide = 12,     // wide *= sigmoid(the one value that weight gives for the normed x)
  kNormHold = 13,     // held = the normed y
  kNormHoldAdd = 14,  // held += the normed y
  kAddHeld = 15,      // x = (x + the normed held) * scale
  kAddWideToY = 16,   // y += scale * weight of wide
};

struct LayerOp {
  LayerOpKind kind;
  Epilogue epilogue;  // of kNormLinear
  float scale;        // of an addition
  int32_t group;      // of layers, in the pool
  int32_t part;       // of the group's blocks
  int64_t layer;      // of the part
  int64_t site;       // by which adapters know a product; -1: none adds to it
  const Linear* weight;
  const Norm* norm;
  const AttentionShape* attention;
  const float* rope;  // [rope_rows, head_dim]
  int64_t rope_rows;
  const Routing* routing;
  const Experts* experts;
};

// Where a field of a structure lies, in bytes; without a field's name, the whole structure; without any, the end.
struct Layout {
  const char* structure;
  const char* field;
  int64_t offset, size;
};

// How this library's structures lie in memory, for Python to compare with its own before it calls anything.
QUIRE_API const Layout* quire_layouts();

// The instruction set in use, as quire_kernels/cpu/variants.py names it.
QUIRE_API const char* quire_variant();

// The names of the activations in the order of their numbers, separated by spaces.
QUIRE_API const char* quire_activations();

// `threads` workers, the calling thread included; worker i > 0 is pinned to cpus[i] if `cpus` is given. Null where the
// system refuses them.
QUIRE_API Context* quire_create(int32_t threads, const int32_t* cpus);
QUIRE_API void quire_destroy(Context* context);
QUIRE_API int32_t quire_threads(const Context* context);

// Where ops of the context fetch from now on what they read once. No result depends on it.
QUIRE_API void quire_fetch(Context* context, Fetch fetch);

// From now on the context's products are divided: this process is rank `rank` of `size`, and `gather(self, ...)` gives
// it what the others computed. All ranks call the same ops with the same arguments, but for their own heads.
QUIRE_API void quire_join(Context* context, int32_t rank, int32_t size, GatherColumns gather, void* self);

// Bytes of the file of memory, zeroed, through which so many ranks of one machine exchange columns.
QUIRE_API int64_t quire_ranks_bytes(int32_t size);

// This process's view of that file. Null: the file is not one, or there is no memory. `patience`: seconds without
// progress of another rank after which it is lost; one whose process ends is lost at once.
QUIRE_API RankMemory* quire_ranks_open(int32_t fd, int32_t rank, int32_t size, double patience);
QUIRE_API void quire_ranks_close(RankMemory* memory);

// Waits, however long it takes, until rank 0 begins an exchange that this one has not. 0 or kRankLost.
QUIRE_API int32_t quire_ranks_await(RankMemory* memory);

// ns [size]: the nanoseconds that each rank has waited in exchanges for what others had not written yet. A rank that is
// slower than the others waits less than they do.
QUIRE_API void quire_ranks_waited(RankMemory* memory, int64_t* ns);

// A GatherColumns through that file; `memory` is a RankMemory.
QUIRE_API int32_t quire_ranks_gather(void* memory, char* data, int64_t rows, int64_t row_bytes, const int64_t* starts);

QUIRE_API int64_t quire_panel_count(const Linear* w);

// XXH64 of [data, data + bytes), by the calling thread alone.
QUIRE_API int64_t quire_checksum(const char* data, int64_t bytes);

// All that follow return 0, or 1 when memory ran out; those that take an AttentionStep also kOutOfRange, products also
// kRankLost.

// Commits the pages of [data, data + bytes), in order, whenever a core is idle.
QUIRE_API int32_t quire_commit(Context* context, char* data, int64_t bytes);

// Fills w->starts from the rows that quire_pack gets after it.
QUIRE_API int32_t quire_lay_out(Context* context, const Linear* w, const bf16* rows, const bf16* above);

// Fills w->packed, for int8 and int4 w->scales and for int8 w->sums, from bf16 rows [n, columns]; for gate-up from
// `rows` and `above`, [n / 2, columns] each.
QUIRE_API int32_t quire_pack(Context* context, const Linear* w, const bf16* rows, const bf16* above);

// Fills w->packed, whose places quire_lay_out knows without rows, from a matrix as others quantised it; for gate-up
// from `rows` and `above`, n / 2 rows each.
QUIRE_API int32_t quire_pack_stored(Context* context, const Linear* w, const StoredRows* rows, const StoredRows* above);

// Of every panel of such a matrix.
QUIRE_API int64_t quire_stored_panel_bytes(const Linear* w);

// Rows `rows` [count] of a matrix of stored.h that has no zero points, as numbers [count, columns].
QUIRE_API int32_t quire_stored_rows(Context* context, const Linear* w, const int64_t* rows, int64_t count, bf16* out);

// Whether all of `count` values are finite numbers, into `finite`.
QUIRE_API int32_t quire_all_finite(Context* context, const bf16* values, int64_t count, uint8_t* finite);

// x [m, columns] bf16 -> norm, or none -> w -> out: bf16 [m, n], with kStoreFloat float [m, n], or of a gate-up pair,
// with its activation, bf16 [m, n / 2]. What the rows' adapters have at `site` is added to the sums; null: no adapters.
QUIRE_API int32_t quire_norm_linear(Context* context, const Linear* w, const bf16* x, int64_t m, const Norm* norm,
                                    void* out, Epilogue epilogue, const StepAdapters* adapters, int64_t site);

// The column of the largest value of each row of norm -> w, of equal values the first, and whether all were finite.
// `allowed` [m, (n + 63) / 64] has a bit for each column that may be told, or is null: all may. -1: none may.
QUIRE_API int32_t quire_greedy(Context* context, const Linear* w, const bf16* x, int64_t m, const Norm* norm,
                               const uint64_t* allowed, int64_t* columns, uint8_t* finite);

// out [m, n] = residual [m, n] + scale * w x, with adapters as above; `out` may be `residual`.
QUIRE_API int32_t quire_linear_add(Context* context, const Linear* w, const bf16* x, int64_t m, float scale,
                                   const bf16* residual, bf16* out, const StepAdapters* adapters, int64_t site);

// residual [m, columns] = (residual + the normed y [m, columns]) * scale.
QUIRE_API int32_t quire_norm_add(Context* context, const bf16* y, int64_t m, int64_t columns, const Norm* norm,
                                 float scale, bf16* residual);

// x [m, columns] *= sigmoid(gate [m, columns]).
QUIRE_API int32_t quire_mul_sigmoid(Context* context, const bf16* gate, int64_t m, int64_t columns, bf16* x);

// x [m, columns] bf16 -> norm, or none -> the experts that each row chooses -> out [m, columns] bf16: residual + scale
// * their weighted sum, or without a residual the sum alone. `out` may be `residual`, and either may be `x`. Adapters
// have what they add to gate_up at `site`, and to down at the next one.
QUIRE_API int32_t quire_mix_experts(Context* context, const Routing* routing, const Experts* experts, const bf16* x,
                                    int64_t m, const Norm* norm, float scale, const bf16* residual, bf16* out,
                                    const StepAdapters* adapters, int64_t site);

// x [m, columns] bf16 -> the `count` experts' logits, as the first of each row of logits [m, weight->n]; the experts
// that each row chooses, best first, and their weights, [m, top_k].
QUIRE_API int32_t quire_route(Context* context, const Routing* routing, int64_t count, const bf16* x, int64_t m,
                              float* logits, int32_t* index, float* weights);

// out [m, columns] = the sum of the experts in `index` [m, top_k], times `weights` [m, top_k]; an index that is no
// expert's adds nothing.
QUIRE_API int32_t quire_given_experts(Context* context, const Experts* experts, const bf16* x, int64_t m, int64_t top_k,
                                      const int64_t* index, const float* weights, bf16* out);

// wide [m, columns] *= sigmoid(w of x [m, w->columns] bf16, normed or not), where w has one row.
QUIRE_API int32_t quire_gate_rows(Context* context, const Linear* w, const bf16* x, int64_t m, const Norm* norm,
                                  int64_t columns, bf16* wide);

// qkv [rows, (num_heads + 2 num_kv_heads) * head_dim] bf16, rope [rope_rows, head_dim] (cosines, then sines)
// -> q [rows, num_heads, head_dim] bf16. Keys and values go to the rows' slots.
QUIRE_API int32_t quire_rope_write(Context* context, const AttentionShape* shape, const KvPool* pool, int64_t layer,
                                   const AttentionStep* step, const bf16* qkv, const float* rope, int64_t rope_rows,
                                   bf16* q);

// q [rows, num_heads, head_dim] bf16 -> out, of the same shape. The rows' own keys and values are in the pool already.
QUIRE_API int32_t quire_attention(Context* context, const AttentionShape* shape, const KvPool* pool, int64_t layer,
                                  const AttentionStep* step, const bf16* q, bf16* out);

// Runs the ops of all layers: x [rows, H] -> the same in place, or with kKeepSampled where `sampled` is given its rows
// alone, as the first rows of x, whose places in the step are `sample_rows`, rising. `pools` are the parts of the pool,
// `steps` the rows as each group of layers sees them. `adapters` of the rows, or null: none has one. The first result
// that is not 0 ends the call and leaves x undefined.
QUIRE_API int32_t quire_layers(Context* context, const LayerOp* ops, int64_t count, const KvPool* pools,
                               const AttentionStep* steps, const AttentionStep* sampled, const int64_t* sample_rows,
                               const StepAdapters* adapters, bf16* x);

// Operations per second (a multiply and an add are two) of fp32 (0), bf16 (1) or int8 (2) multiply-adds into `result`;
// 0 where the compiled variant has no instruction for them.
QUIRE_API int32_t quire_probe_arithmetic(Context* context, int32_t kind, double seconds, double* result);

// Which instruction that is, as the manual of the CPU names it; empty where the rate is 0.
QUIRE_API const char* quire_probe_instruction(int32_t kind);

// Bytes per second that all workers together read from memory, the best of a few patterns. Each worker has
// `bytes_per_worker` of its own, more than any cache holds; each pattern is tried `passes` times.
QUIRE_API int32_t quire_probe_read(Context* context, int64_t bytes_per_worker, int32_t passes, double* result);

}  // namespace quire
