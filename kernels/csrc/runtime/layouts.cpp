// How the structures of ops.h lie in memory, in the words of the compiler that built this library.
//
// Owns the list of their fields. Promises: every field by name, offset and size. Must not know: what they mean.
#include <cstddef>
#include <type_traits>

#include "ops.h"

namespace quire {
namespace {

template <typename Structure>
constexpr int64_t size_of() {
  static_assert(std::is_standard_layout_v<Structure> && std::is_trivially_copyable_v<Structure>, "Python writes it");
  return static_cast<int64_t>(sizeof(Structure));
}

#define QUIRE_STRUCTURE(structure) {#structure, nullptr, 0, size_of<structure>()}
#define QUIRE_FIELD(structure, field) {#structure, #field, offsetof(structure, field), sizeof(structure::field)}

constexpr Layout kLayouts[] = {
    QUIRE_STRUCTURE(Linear),
    QUIRE_FIELD(Linear, kind),
    QUIRE_FIELD(Linear, gate_up),
    QUIRE_FIELD(Linear, n),
    QUIRE_FIELD(Linear, k),
    QUIRE_FIELD(Linear, columns),
    QUIRE_FIELD(Linear, packed),
    QUIRE_FIELD(Linear, starts),
    QUIRE_FIELD(Linear, scales),
    QUIRE_FIELD(Linear, sums),
    QUIRE_FIELD(Linear, bias),
    QUIRE_FIELD(Linear, group),
    QUIRE_FIELD(Linear, scale_form),
    QUIRE_FIELD(Linear, offset_form),
    QUIRE_FIELD(Linear, table),
    QUIRE_FIELD(Linear, parts),
    QUIRE_FIELD(Linear, num_parts),

    QUIRE_STRUCTURE(StoredRows),
    QUIRE_FIELD(StoredRows, codes),
    QUIRE_FIELD(StoredRows, scales),
    QUIRE_FIELD(StoredRows, scale_units),
    QUIRE_FIELD(StoredRows, offsets),
    QUIRE_FIELD(StoredRows, offset_units),

    QUIRE_STRUCTURE(Norm),
    QUIRE_FIELD(Norm, weight),
    QUIRE_FIELD(Norm, eps),
    QUIRE_FIELD(Norm, as_float),
    QUIRE_FIELD(Norm, centred),

    QUIRE_STRUCTURE(KvPool),
    QUIRE_FIELD(KvPool, data),
    QUIRE_FIELD(KvPool, kind),
    QUIRE_FIELD(KvPool, units),
    QUIRE_FIELD(KvPool, num_blocks),
    QUIRE_FIELD(KvPool, num_layers),
    QUIRE_FIELD(KvPool, num_kv_heads),
    QUIRE_FIELD(KvPool, head_dim),
    QUIRE_FIELD(KvPool, block_bytes),

    QUIRE_STRUCTURE(AttentionShape),
    QUIRE_FIELD(AttentionShape, num_heads),
    QUIRE_FIELD(AttentionShape, num_kv_heads),
    QUIRE_FIELD(AttentionShape, head_dim),
    QUIRE_FIELD(AttentionShape, scale),
    QUIRE_FIELD(AttentionShape, norm_eps),
    QUIRE_FIELD(AttentionShape, softcap),
    QUIRE_FIELD(AttentionShape, row_norms),
    QUIRE_FIELD(AttentionShape, v_norm),
    QUIRE_FIELD(AttentionShape, bidirectional),
    QUIRE_FIELD(AttentionShape, window),
    QUIRE_FIELD(AttentionShape, q_norm),
    QUIRE_FIELD(AttentionShape, k_norm),
    QUIRE_FIELD(AttentionShape, sinks),

    QUIRE_STRUCTURE(AttentionStep),
    QUIRE_FIELD(AttentionStep, rows),
    QUIRE_FIELD(AttentionStep, sequences),
    QUIRE_FIELD(AttentionStep, table_width),
    QUIRE_FIELD(AttentionStep, positions),
    QUIRE_FIELD(AttentionStep, slots),
    QUIRE_FIELD(AttentionStep, query_starts),
    QUIRE_FIELD(AttentionStep, context_lens),
    QUIRE_FIELD(AttentionStep, block_tables),

    QUIRE_STRUCTURE(LayerOp),
    QUIRE_FIELD(LayerOp, kind),
    QUIRE_FIELD(LayerOp, epilogue),
    QUIRE_FIELD(LayerOp, scale),
    QUIRE_FIELD(LayerOp, group),
    QUIRE_FIELD(LayerOp, part),
    QUIRE_FIELD(LayerOp, layer),
    QUIRE_FIELD(LayerOp, site),
    QUIRE_FIELD(LayerOp, weight),
    QUIRE_FIELD(LayerOp, norm),
    QUIRE_FIELD(LayerOp, attention),
    QUIRE_FIELD(LayerOp, rope),
    QUIRE_FIELD(LayerOp, rope_rows),
    QUIRE_FIELD(LayerOp, routing),
    QUIRE_FIELD(LayerOp, experts),

    QUIRE_STRUCTURE(LowRank),
    QUIRE_FIELD(LowRank, rank),
    QUIRE_FIELD(LowRank, shrink),
    QUIRE_FIELD(LowRank, scales),
    QUIRE_FIELD(LowRank, expand),
    QUIRE_FIELD(LowRank, halves),
    QUIRE_FIELD(LowRank, per_expert),

    QUIRE_STRUCTURE(StepAdapters),
    QUIRE_FIELD(StepAdapters, slots),
    QUIRE_FIELD(StepAdapters, adapters),
    QUIRE_FIELD(StepAdapters, count),

    QUIRE_STRUCTURE(Routing),
    QUIRE_FIELD(Routing, weight),
    QUIRE_FIELD(Routing, selection_bias),
    QUIRE_FIELD(Routing, expert_scales),
    QUIRE_FIELD(Routing, norm),
    QUIRE_FIELD(Routing, top_k),
    QUIRE_FIELD(Routing, scoring),
    QUIRE_FIELD(Routing, groups),
    QUIRE_FIELD(Routing, kept_groups),
    QUIRE_FIELD(Routing, best_of_group),
    QUIRE_FIELD(Routing, normalised),
    QUIRE_FIELD(Routing, least_sum),
    QUIRE_FIELD(Routing, epsilon),
    QUIRE_FIELD(Routing, scale),

    QUIRE_STRUCTURE(Experts),
    QUIRE_FIELD(Experts, gate_up),
    QUIRE_FIELD(Experts, down),
    QUIRE_FIELD(Experts, count),
    QUIRE_FIELD(Experts, inner),
    QUIRE_FIELD(Experts, activation),

    {nullptr, nullptr, 0, 0},
};

#undef QUIRE_STRUCTURE
#undef QUIRE_FIELD

}  // namespace

QUIRE_API const Layout* quire_layouts() { return kLayouts; }

}  // namespace quire
