// Projections with what surrounds them, each in one run of the pool: norm, quantise, multiply, epilogue.
//
// Owns where prepared rows live. Promises: a row's result does not depend on who prepared it. Must not know: layers.
#include <algorithm>

#include "gemm/gemm.h"
#include "gemm/gemm_rows.h"
#include "gemm/shrinking.h"
#include "ops.h"
#include "runtime/context.h"
#include "weights/kinds.h"

namespace quire {
namespace {

// Few values are prepared by every worker for itself, sooner than by each a part and a wait for the others.
constexpr int64_t kRedundantValues = 4096;
constexpr int64_t kPreparedTogether = 8;  // rows: short enough to be dealt evenly

struct Input {
  const bf16* data;  // [m, columns]
  int64_t m;
  const Norm* norm;  // of the columns, or null: none
};

template <typename Kind>
int64_t rows_bytes(const Linear& w, int64_t m) {
  return aligned(placed_bytes<Kind>(w, m)) + aligned(m * 4) + aligned(m * sums_per_row<Kind>(w) * 4);
}

// Prepared rows: data, scales and group sums, one after the other.
template <typename Kind>
struct Prepared {
  Prepared(const Linear& w, int64_t m, char* memory)
      : data(memory),
        scales(reinterpret_cast<float*>(memory + aligned(placed_bytes<Kind>(w, m)))),
        sums(reinterpret_cast<int32_t*>(reinterpret_cast<char*>(scales) + aligned(m * 4))) {}
  char* data;
  float* scales;
  int32_t* sums;
};

// `normed` [columns] and `whole` [k] are the worker's own.
template <typename Kind>
void prepare_row(const Linear& w, const Input& in, int64_t row, const Prepared<Kind>& to, bf16* normed, char* whole) {
  const bool apart = lies_apart<Kind>(w, in.m);
  char* data = apart ? whole : to.data + row * row_bytes<Kind>(w);
  const RawRow raw{in.data + row * w.columns, in.norm, w.columns};
  Kind::prepare(w, raw, normed, data, to.scales + row, to.sums + row * sums_per_row<Kind>(w));
  if (apart) take_apart<Kind>(w, in.m, row, whole, to.data);
}

template <typename Kind>
void project_as(Context& context, const Linear& w, const Input& in, const Output& out) {
  if (in.m == 0) return;
  Pool& pool = context.pool;
  const int64_t sums_bytes = aligned(gemm_scratch_bytes(w, in.m));
  const int64_t whole_bytes = aligned(w.k * 2);
  const bool as_is = Kind::kTakesRowsAsIs && !takes_tiles<Kind>(w, in.m) && in.norm == nullptr && w.k == w.columns;
  const bool redundant = in.m * w.k <= kRedundantValues;
  const int64_t prepared_bytes = as_is ? 0 : rows_bytes<Kind>(w, in.m);
  if (!redundant) context.shared.reserve(static_cast<size_t>(prepared_bytes));
  context.reserve_own(static_cast<size_t>(sums_bytes + 2 * whole_bytes + (redundant ? prepared_bytes : 0)));

  pool.run([&](int worker) {
    char* own = context.own[static_cast<size_t>(worker)].data();
    Output to_own = out;
    if (out.best != nullptr) to_own.best += worker * in.m;
    if (as_is) return gemm_worker(pool.second, worker, w, {in.m, in.data, nullptr, nullptr}, to_own, own);
    bf16* normed = reinterpret_cast<bf16*>(own + sums_bytes);
    char* whole = own + sums_bytes + whole_bytes;
    const Prepared<Kind> to(w, in.m, redundant ? whole + whole_bytes : context.shared.data());
    if (redundant) {
      for (int64_t row = 0; row < in.m; ++row) prepare_row<Kind>(w, in, row, to, normed, whole);
    } else {
      Piece rows;
      while (pool.first.take(worker, in.m, kPreparedTogether, &rows)) {
        for (int64_t row = rows.begin; row < rows.end; ++row) prepare_row<Kind>(w, in, row, to, normed, whole);
        pool.first.finish(rows.end - rows.begin);
      }
      pool.first.wait(worker, in.m);
    }
    gemm_worker(pool.second, worker, w, {in.m, to.data, to.scales, to.sums}, to_own, own);
  });
}

void project(Context& context, const Linear& w, const Input& in, const Output& out) {
  with_kind(w.kind, [&](auto kind) { project_as<decltype(kind)>(context, w, in, out); });
}

}  // namespace

QUIRE_API int32_t quire_norm_linear(Context* context, const Linear* w, const bf16* x, int64_t m, const Norm* norm,
                                    void* out, Epilogue epilogue, const StepAdapters* adapters, int64_t site) {
  return guarded(context, [&] {
    Output to{epilogue, out, w->gate_up ? w->n / 2 : w->n, nullptr};
    Addend addend{};
    if (adapters != nullptr) addend = shrunk_rows(*context, *adapters, site, *w, x, m, norm);
    if (addend.width > 0) to.addend = &addend;
    project(*context, *w, {x, m, norm}, to);
  });
}

QUIRE_API int32_t quire_linear_add(Context* context, const Linear* w, const bf16* x, int64_t m, float scale,
                                   const bf16* residual, bf16* out, const StepAdapters* adapters, int64_t site) {
  return guarded(context, [&] {
    Output to{Epilogue::kAdd, out, w->n, residual};
    to.scale = scale;
    Addend addend{};
    if (adapters != nullptr) addend = shrunk_rows(*context, *adapters, site, *w, x, m, nullptr);
    if (addend.width > 0) to.addend = &addend;
    project(*context, *w, {x, m, nullptr}, to);
  });
}

QUIRE_API int32_t quire_norm_add(Context* context, const bf16* y, int64_t m, int64_t columns, const Norm* norm,
                                 float scale, bf16* residual) {
  return guarded(context, [&] {
    context->pool.run([&](int worker) {
      Piece rows;
      while (context->pool.first.take(worker, m, kPreparedTogether, &rows)) {
        for (int64_t row = rows.begin; row < rows.end; ++row) {
          norm_add_row(y + row * columns, *norm, columns, scale, residual + row * columns);
        }
      }
    });
  });
}

QUIRE_API int32_t quire_greedy(Context* context, const Linear* w, const bf16* x, int64_t m, const Norm* norm,
                               const uint64_t* allowed, int64_t* columns, uint8_t* finite) {
  return guarded(context, [&] {
    const int64_t workers = context->pool.size();
    context->between.reserve(static_cast<size_t>(workers * m) * sizeof(Best));
    Best* best = reinterpret_cast<Best*>(context->between.data());
    std::fill(best, best + workers * m, Best{0.0f, -1, true});
    project(*context, *w, {x, m, norm}, {Epilogue::kBest, nullptr, 0, nullptr, best, allowed});
    for (int64_t row = 0; row < m; ++row) {
      Best first{0.0f, -1, true};
      for (int64_t worker = 0; worker < workers; ++worker) {
        const Best& one = best[worker * m + row];
        first.finite = first.finite && one.finite;
        const bool wins =
            first.column < 0 || one.value > first.value || (one.value == first.value && one.column < first.column);
        if (one.column >= 0 && wins) {
          first.value = one.value;
          first.column = one.column;
        }
      }
      columns[row] = first.column;
      finite[row] = first.finite;
    }
  });
}

}  // namespace quire
