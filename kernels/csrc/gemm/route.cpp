// The choice of a row's experts.
//
// Promises: the order of all sums is fixed. Must not know: rows' neighbours, products.
#include <algorithm>

#include "gemm/experts.h"
#include "simd/simd.h"

namespace quire {
namespace {

// Scores of all experts into `scores`, whole vectors, zeros past the last one. Those of a softmax are not divided yet;
// their sum.
float score(const Routing& routing, const float* logits, int64_t count, int64_t padded, float* scores) {
  float most = logits[0];
  for (int64_t i = 1; i < count; ++i) most = logits[i] > most ? logits[i] : most;
  std::copy(logits, logits + count, scores);
  std::fill(scores + count, scores + padded, most);
  Vec sum = vzero();
  for (int64_t at = 0; at < padded; at += kLanes) {
    const Vec value = vload(scores + at);
    if (routing.scoring == Scoring::kSigmoid) {
      vstore(scores + at, vdiv(vset(1.0f), vadd(vset(1.0f), vexp(vsub(vzero(), value)))));
    } else {
      vstore(scores + at, vexp(vsub(value, vset(most))));
    }
    if (at + kLanes > count) std::fill(scores + count, scores + padded, 0.0f);
    sum = vadd(sum, vload(scores + at));
  }
  return lane_sum(sum);
}

}  // namespace

void route_row(const Routing& routing, const float* logits, int64_t count, float* scratch, int32_t* index,
               float* weights) {
  const int64_t padded = routing_floats(count) / 2;
  float* scores = scratch;
  const float all = score(routing, logits, count, padded, scores);
  const float share = routing.scoring == Scoring::kSoftmax ? all : 1.0f;
  const float* decisive = logits;
  if (routing.selection_bias != nullptr) {
    float* biased = scratch + padded;
    for (int64_t i = 0; i < count; ++i) biased[i] = scores[i] / share + routing.selection_bias[i];
    decisive = biased;
  }
  int32_t chosen = 0;
  for (int64_t i = 0; i < count; ++i) {
    int32_t at = chosen;
    while (at > 0 && decisive[i] > decisive[index[at - 1]]) --at;
    if (at == routing.top_k) continue;
    chosen = std::min(chosen + 1, routing.top_k);
    for (int32_t j = chosen - 1; j > at; --j) index[j] = index[j - 1];
    index[at] = static_cast<int32_t>(i);
  }
  float total = share;
  if (routing.normalised != 0) {
    total = 0.0f;
    for (int32_t j = 0; j < routing.top_k; ++j) total += scores[index[j]];
  }
  for (int32_t j = 0; j < routing.top_k; ++j) weights[j] = scores[index[j]] / total * routing.scale;
}

}  // namespace quire
