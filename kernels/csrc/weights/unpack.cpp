// Rows of a matrix that others quantised (stored.h), back from its panels to the numbers that they stand for.
//
// Promises: a value times its scale is rounded to float32, then the sum with the offset, then the result to bf16.
// Must not know: what the rows are for.
#include "ops.h"
#include "runtime/context.h"
#include "simd/unroll.h"
#include "weights/kinds.h"

namespace quire {
namespace {

constexpr int64_t kRowsTogether = 4;  // short enough to be dealt evenly

template <typename Kind>
void unpack_row(const Linear& w, int64_t row, bf16* out) {
  using Codes = typename Kind::Codes;
  const StoredLayout layout = Kind::layout(w);
  const StoredScales scales(w, layout);
  const Codes codes(w);
  const char* const panel = panel_at(w, row / kPanelRows);
  const int64_t lane = row % kPanelRows % kLanes;
  const int v = static_cast<int>(row % kPanelRows / kLanes);
  const auto of_lane = [&](Vec values) {
    float lanes[kLanes];
    vstore(lanes, values);
    return lanes[lane];
  };
  int64_t column = 0;
  for (int64_t block = 0; block < layout.blocks; ++block) {
    const char* const header = panel + layout.header_at(block / layout.group);
    const char* const span = panel + layout.span_at(block / layout.group);
    const Vec scale = scales.scale(header, span, v);
    const float factor = of_lane(scale);
    const float offset = scales.has_offsets ? of_lane(scales.offset(header, span, v, scale)) : 0.0f;
    const char* at = panel + layout.block_at(block) + v * kLanes * 4;
    for (int64_t load = 0; load < layout.steps / Codes::kSteps; ++load, at += Codes::kLoadBytes) {
      const typename Codes::Load words = Codes::load(at);
      unrolled<Codes::kSteps>([&](auto s) {
        bf16 pairs[2 * kLanes];
        pstore(pairs, codes.template pairs<s>(words));
        for (int64_t i = 2 * lane; i < 2 * lane + 2 && column < w.columns; ++i) {
          const float value = to_float(pairs[i]) * factor;
          out[column++] = to_bf16(scales.has_offsets ? value + offset : value);
        }
      });
    }
  }
}

}  // namespace

QUIRE_API int32_t quire_stored_rows(Context* context, const Linear* w, const int64_t* rows, int64_t count, bf16* out) {
  return guarded(context, [&] {
    with_stored_kind(w->kind, [&](auto kind) {
      using Kind = decltype(kind);
      const auto unpack = [&](int64_t i) { unpack_row<Kind>(*w, rows[i], out + i * w->columns); };
      if (count <= kRowsTogether) {
        for (int64_t i = 0; i < count; ++i) unpack(i);
        return;
      }
      Pool& pool = context->pool;
      pool.run([&](int worker) {
        Piece piece;
        while (pool.first.take(worker, count, kRowsTogether, &piece)) {
          for (int64_t i = piece.begin; i < piece.end; ++i) unpack(i);
        }
      });
    });
  });
}

}  // namespace quire
