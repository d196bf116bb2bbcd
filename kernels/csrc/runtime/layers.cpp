// All layers of a step in one call: the ops that Python would call one after the other, without the way back to it.
//
// Owns the rows between the ops. Promises: the very functions that are called one by one, in the same order.
// Must not know: embedding, head, how an op computes.
#include <algorithm>
#include <cstring>

#include "ops.h"
#include "runtime/context.h"

namespace quire {
namespace {

// Row chosen[i] to place i; `chosen` rises, so no row is overwritten before it is read.
void keep_rows(bf16* x, int64_t width, const int64_t* chosen, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    std::memmove(x + i * width, x + chosen[i] * width, static_cast<size_t>(width) * sizeof(bf16));
  }
}

}  // namespace

QUIRE_API int32_t quire_layers(Context* context, const LayerArgs* layers, int64_t count, float eps, const KvPool* pool,
                               const AttentionStep* step, const float* rope, int64_t rope_rows,
                               const AttentionStep* sampled, const int64_t* sample_rows, bf16* x) {
  int64_t rows = step->rows;
  int64_t wide = 0, heads = 0;  // the widest of qkv and gate-up, of q and its attention
  for (int64_t i = 0; i < count; ++i) {
    wide = std::max({wide, layers[i].qkv->n, layers[i].gate_up->n / 2});
    heads = std::max<int64_t>(heads, layers[i].attention->num_heads * layers[i].attention->head_dim);
  }
  const int64_t wide_bytes = aligned(rows * wide * 2), head_bytes = aligned(rows * heads * 2);
  try {
    context->between.reserve(static_cast<size_t>(wide_bytes + 2 * head_bytes));
  } catch (const std::bad_alloc&) {
    return 1;
  }
  bf16* projected = reinterpret_cast<bf16*>(context->between.data());
  bf16* q = reinterpret_cast<bf16*>(context->between.data() + wide_bytes);
  bf16* mixed = reinterpret_cast<bf16*>(context->between.data() + wide_bytes + head_bytes);

  int32_t failed = 0;
  for (int64_t i = 0; i < count && failed == 0; ++i) {
    const LayerArgs& layer = layers[i];
    failed = quire_norm_linear(context, layer.qkv, x, rows, layer.attention_norm, eps, projected, 0);
    if (!failed) {
      failed = quire_rope_write(context, layer.attention, pool, i, step, projected, rope, rope_rows, q);
    }
    if (!failed && i + 1 == count && sampled != nullptr) {
      rows = sampled->rows;
      if (rows == 0) break;
      keep_rows(q, layer.o->columns, sample_rows, rows);
      keep_rows(x, layer.qkv->columns, sample_rows, rows);
      step = sampled;
    }
    if (!failed) failed = quire_attention(context, layer.attention, pool, i, step, q, mixed);
    if (!failed) failed = quire_linear_add(context, layer.o, mixed, rows, x, x);
    if (!failed) failed = quire_norm_linear(context, layer.gate_up, x, rows, layer.mlp_norm, eps, projected, 0);
    if (!failed) failed = quire_linear_add(context, layer.down, projected, rows, x, x);
  }
  return failed;
}

}  // namespace quire
