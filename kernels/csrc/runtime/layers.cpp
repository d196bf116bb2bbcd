// All layers of a step in one call: the ops that Python would call one after the other, without the way back to it.
//
// Owns the rows between the ops. Promises: the very functions that are called one by one, in the program's order.
// Must not know: embedding, head, how an op computes.
#include <algorithm>
#include <cstring>

#include "attention/head_share.h"
#include "gemm/products.h"
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

// The projection to queries, keys and values, for the heads that `shape` is of. Where all heads are normed together
// every rank needs all of them.
int32_t project_heads(Context* context, const LayerOp* op, const AttentionShape& shape, const bf16* x, int64_t rows,
                      bf16* wide, const StepAdapters* adapters) {
  if (context->ranks.size == 1 || shape.row_norms != 0) {
    return quire_norm_linear(context, op->weight, x, rows, op->norm, wide, op->epilogue, adapters, op->site);
  }
  const PanelRanges own = HeadShare::of(shape, op->weight->n, context->ranks).panels(shape);
  return norm_linear_panels(context, op->weight, x, rows, op->norm, wide, op->epilogue, adapters, op->site, own);
}

// Attention of this rank's heads, and of the others: mixed [rows, all heads]. `own` has room for the rank's.
int32_t attend(Context* context, const LayerOp* op, const KvPool* pool, const AttentionStep* step, const bf16* q,
               bf16* own, bf16* mixed) {
  const Ranks& ranks = context->ranks;
  if (ranks.size == 1) return quire_attention(context, op->attention, pool, op->layer, step, q, mixed);
  const int32_t failed = quire_attention(context, op->attention, pool, op->layer, step, q, own);
  if (failed != 0) return failed;
  const int64_t width = int64_t{op->attention->num_heads} * op->attention->head_dim;
  for (int64_t row = 0; row < step->rows; ++row) {
    std::memcpy(mixed + (row * ranks.size + ranks.rank) * width, own + row * width,
                static_cast<size_t>(width) * sizeof(bf16));
  }
  return guarded(
      context, [&] { gather_outputs(ranks, mixed, step->rows, width * ranks.size, ranks.size, width, sizeof(bf16)); });
}

}  // namespace

QUIRE_API int32_t quire_layers(Context* context, const LayerOp* ops, int64_t count, const KvPool* pools,
                               const AttentionStep* steps, const AttentionStep* sampled, const int64_t* sample_rows,
                               const StepAdapters* adapters, bf16* x) {
  int64_t widest = 0, heads = 0, hidden = 0, wide_columns = 0;
  const int64_t num_ranks = context->ranks.size;
  bool projects = false, holds = false;
  for (const LayerOp* op = ops; op != ops + count; ++op) {
    if (op->kind == LayerOpKind::kNormLinear) {
      hidden = op->weight->columns;
      widest = std::max(widest, op->weight->gate_up ? op->weight->n / 2 : op->weight->n);
    } else if (op->kind == LayerOpKind::kAttend) {
      heads = std::max<int64_t>(heads, int64_t{op->attention->num_heads} * op->attention->head_dim * num_ranks);
    }
    projects = projects || op->kind == LayerOpKind::kNormAdd || op->kind == LayerOpKind::kNormHold;
    holds = holds || op->kind == LayerOpKind::kNormHold;
  }
  int64_t rows = steps->rows;
  const int64_t wide_bytes = aligned(rows * widest * 2), head_bytes = aligned(rows * heads * 2);
  const int64_t y_bytes = projects ? aligned(rows * hidden * 2) : 0, held_bytes = holds ? y_bytes : 0;
  const int64_t slot_bytes = aligned(rows * 4), own_bytes = num_ranks > 1 ? head_bytes : 0;
  try {
    const int64_t bytes = wide_bytes + 2 * head_bytes + y_bytes + held_bytes + slot_bytes + own_bytes;
    context->between.reserve(static_cast<size_t>(bytes));
  } catch (const std::bad_alloc&) {
    return 1;
  }
  bf16* wide = reinterpret_cast<bf16*>(context->between.data());
  bf16* q = reinterpret_cast<bf16*>(context->between.data() + wide_bytes);
  bf16* mixed = reinterpret_cast<bf16*>(context->between.data() + wide_bytes + head_bytes);
  bf16* y = reinterpret_cast<bf16*>(context->between.data() + wide_bytes + 2 * head_bytes);
  bf16* held = y + y_bytes / 2;
  bf16* own_mixed = held + (held_bytes + slot_bytes) / 2;

  StepAdapters kept{};  // of the sample rows
  const auto added_at = [&](const LayerOp* op) { return op->site < 0 ? nullptr : adapters; };
  int64_t q_width = 0;
  int32_t failed = 0;
  for (const LayerOp* op = ops; op != ops + count && failed == 0; ++op) {
    switch (op->kind) {
      case LayerOpKind::kNormLinear:
        wide_columns = op->weight->gate_up ? op->weight->n / 2 : op->weight->n;
        if (op + 1 != ops + count && op[1].kind == LayerOpKind::kRopeWrite) {
          failed = project_heads(context, op, *op[1].attention, x, rows, wide, added_at(op));
          break;
        }
        failed = quire_norm_linear(context, op->weight, x, rows, op->norm, wide, op->epilogue, added_at(op), op->site);
        break;
      case LayerOpKind::kRopeWrite:
        q_width = int64_t{op->attention->num_heads} * op->attention->head_dim;
        failed = rope_write_share(context, op->attention, HeadShare::of(*op->attention, wide_columns, context->ranks),
                                  pools + op->part, op->layer, steps + op->group, wide, op->rope, op->rope_rows, q);
        break;
      case LayerOpKind::kKeepSampled:
        if (sampled == nullptr) break;
        rows = sampled->rows;
        if (rows == 0) return 0;
        keep_rows(q, q_width, sample_rows, rows);
        keep_rows(x, hidden, sample_rows, rows);
        if (adapters != nullptr) {
          kept = *adapters;
          int32_t* slots = reinterpret_cast<int32_t*>(held + held_bytes / 2);
          for (int64_t i = 0; i < rows; ++i) slots[i] = adapters->slots[sample_rows[i]];
          kept.slots = slots;
          adapters = &kept;
        }
        steps = sampled;
        break;
      case LayerOpKind::kAttend:
        failed = attend(context, op, pools + op->part, steps + op->group, q, own_mixed, mixed);
        break;
      case LayerOpKind::kGateMixed:  // as wide as the queries, which nobody reads any more
        failed = quire_norm_linear(context, op->weight, x, rows, op->norm, q, Epilogue::kStore, nullptr, -1);
        if (failed == 0) failed = quire_mul_sigmoid(context, q, rows, op->weight->n, mixed);
        break;
      case LayerOpKind::kAddMixed:
      case LayerOpKind::kAddWide: {
        const bf16* source = op->kind == LayerOpKind::kAddMixed ? mixed : wide;
        failed = quire_linear_add(context, op->weight, source, rows, op->scale, x, x, added_at(op), op->site);
        break;
      }
      case LayerOpKind::kAddWideToY:
        failed = quire_linear_add(context, op->weight, wide, rows, op->scale, y, y, added_at(op), op->site);
        break;
      case LayerOpKind::kProjectMixed:
      case LayerOpKind::kProjectWide: {
        const bf16* source = op->kind == LayerOpKind::kProjectMixed ? mixed : wide;
        failed =
            quire_norm_linear(context, op->weight, source, rows, nullptr, y, Epilogue::kStore, added_at(op), op->site);
        break;
      }
      case LayerOpKind::kNormAdd: failed = quire_norm_add(context, y, rows, hidden, op->norm, op->scale, x); break;
      case LayerOpKind::kAddExperts:
        failed = quire_mix_experts(context, op->routing, op->experts, x, rows, op->norm, op->scale, x, x, added_at(op),
                                   op->site);
        break;
      case LayerOpKind::kMixExperts:
        failed = quire_mix_experts(context, op->routing, op->experts, x, rows, op->norm, 1.0f, nullptr, y, added_at(op),
                                   op->site);
        break;
      case LayerOpKind::kGateWide:
        failed = quire_gate_rows(context, op->weight, x, rows, op->norm, wide_columns, wide);
        break;
      case LayerOpKind::kNormHold:
        std::memset(held, 0, static_cast<size_t>(rows * hidden) * sizeof(bf16));
        [[fallthrough]];
      case LayerOpKind::kNormHoldAdd: failed = quire_norm_add(context, y, rows, hidden, op->norm, 1.0f, held); break;
      case LayerOpKind::kAddHeld: failed = quire_norm_add(context, held, rows, hidden, op->norm, op->scale, x); break;
    }
  }
  return failed;
}

}  // namespace quire
