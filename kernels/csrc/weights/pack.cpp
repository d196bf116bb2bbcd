// Weights into panels: transposes, quantises, pads with zeros.
//
// Owns where each panel goes. Promises: writes every byte of the panels; panels in parallel, each on its own.
// Must not know: kinds of weights, files, which layer a matrix is from.
#include "ops.h"
#include "runtime/context.h"
#include "weights/kinds.h"

namespace quire {

QUIRE_API int64_t quire_panel_count(const Linear* w) { return panel_count(*w); }

QUIRE_API int32_t quire_lay_out(Context* context, const Linear* w, const bf16* rows, const bf16* above) {
  return guarded(context, [&] {
    const Source from{rows, above};
    const int64_t panels = panel_count(*w);
    int64_t* starts = const_cast<int64_t*>(w->starts);
    Pool& pool = context->pool;
    with_kind(w->kind, [&](auto kind) {
      pool.run([&](int worker) {
        Piece piece;
        while (pool.first.take(worker, panels, 1, &piece)) {
          starts[piece.begin + 1] = kind.packed_bytes(*w, from, piece.begin);
        }
      });
    });
    starts[0] = 0;
    for (int64_t panel = 0; panel < panels; ++panel) starts[panel + 1] += starts[panel];
  });
}

QUIRE_API int32_t quire_pack(Context* context, const Linear* w, const bf16* rows, const bf16* above) {
  return guarded(context, [&] {
    const Source from{rows, above};
    float* scales = const_cast<float*>(w->scales);
    int32_t* sums = const_cast<int32_t*>(w->sums);
    Pool& pool = context->pool;
    context->reserve_own(2 * static_cast<size_t>(kPanelRows * w->k) * sizeof(bf16));
    with_made_kind(w->kind, [&](auto kind) {
      pool.run([&](int worker) {
        char* stage = context->own[static_cast<size_t>(worker)].data();
        Piece piece;
        while (pool.first.take(worker, panel_count(*w), 1, &piece)) {
          const int64_t panel = piece.begin, lane = panel * kPanelRows;
          const Panel to{const_cast<char*>(panel_at(*w, panel)), scales == nullptr ? nullptr : scales + lane,
                         sums == nullptr ? nullptr : sums + lane};
          kind.pack(*w, from, panel, stage, to);
        }
      });
    });
  });
}

QUIRE_API int64_t quire_stored_panel_bytes(const Linear* w) {
  return with_stored_kind(w->kind, [&](auto kind) { return kind.panel_bytes(*w); });
}

QUIRE_API int32_t quire_pack_stored(Context* context, const Linear* w, const StoredRows* rows,
                                    const StoredRows* above) {
  return guarded(context, [&] {
    Pool& pool = context->pool;
    with_stored_kind(w->kind, [&](auto kind) {
      pool.run([&](int worker) {
        Piece piece;
        while (pool.first.take(worker, panel_count(*w), 1, &piece)) {
          kind.pack_stored(*w, *rows, above, piece.begin, const_cast<char*>(panel_at(*w, piece.begin)));
        }
      });
    });
  });
}

}  // namespace quire
