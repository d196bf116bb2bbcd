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

// The places of the `most` largest of those `count` values that are allowed, the largest first, of equals the lower.
template <typename Allowed>
void largest(const float* values, int64_t count, int32_t most, const Allowed& allowed, int32_t* places) {
  int32_t chosen = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (!allowed(i)) continue;
    int32_t at = chosen;
    while (at > 0 && values[i] > values[places[at - 1]]) --at;
    if (at == most) continue;
    chosen = std::min(chosen + 1, most);
    for (int32_t j = chosen - 1; j > at; --j) places[j] = places[j - 1];
    places[at] = static_cast<int32_t>(i);
  }
}

// Of each group the sum of its `best_of_group` largest values, then 1 for those that are kept and 0 for the others.
void keep_groups(const Routing& routing, const float* values, int64_t count, float* groups, int32_t* places) {
  const int64_t size = count / routing.groups;
  for (int32_t group = 0; group < routing.groups; ++group) {
    const float* of_group = values + group * size;
    largest(of_group, size, routing.best_of_group, [](int64_t) { return true; }, places);
    groups[group] = of_group[places[0]];
    if (routing.best_of_group > 1) groups[group] += of_group[places[1]];
  }
  largest(groups, routing.groups, routing.kept_groups, [](int64_t) { return true; }, places);
  std::fill(groups, groups + routing.groups, 0.0f);
  for (int32_t i = 0; i < routing.kept_groups; ++i) groups[places[i]] = 1.0f;
}

}  // namespace

void route_row(const Routing& routing, const float* logits, int64_t count, float* scratch, int32_t* index,
               float* weights) {
  const int64_t padded = routing_floats(count) / kRoutingParts;
  float *scores = scratch, *own = scratch + padded, *groups = own + padded;
  const float all = score(routing, logits, count, padded, scores);
  const float share = routing.scoring == Scoring::kSoftmax ? all : 1.0f;
  const float* decisive = logits;
  if (routing.selection_bias != nullptr || routing.groups > 1) {
    for (int64_t i = 0; i < count; ++i) {
      own[i] = scores[i] / share;
      if (routing.selection_bias != nullptr) own[i] += routing.selection_bias[i];
    }
    decisive = own;
  }
  if (routing.groups > 1) {
    keep_groups(routing, decisive, count, groups, reinterpret_cast<int32_t*>(groups + padded));
    const int64_t size = count / routing.groups;
    largest(decisive, count, routing.top_k, [&](int64_t i) { return groups[i / size] > 0.0f; }, index);
  } else {
    largest(decisive, count, routing.top_k, [](int64_t) { return true; }, index);
  }
  float total = share;
  if (routing.normalised != 0) {
    total = 0.0f;
    for (int32_t j = 0; j < routing.top_k; ++j) total += scores[index[j]];
    if (routing.least_sum > 0.0f || routing.epsilon > 0.0f) {  // of scores that are divided
      const float sum = total / share;
      total = ((sum < routing.least_sum ? routing.least_sum : sum) + routing.epsilon) * share;
    }
  }
  for (int32_t j = 0; j < routing.top_k; ++j) {
    weights[j] = scores[index[j]] / total * routing.scale;
    if (routing.expert_scales != nullptr) weights[j] *= routing.expert_scales[index[j]];
  }
}

}  // namespace quire
