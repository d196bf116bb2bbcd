// Mixtures of experts: how rows choose theirs, and the matrices of all experts of a layer.
//
// Promises: a row's choice and its result depend on that row alone. Must not know: how a product is computed.
#pragma once

#include <cstdint>

#include "gemm/gemm.h"
#include "gemm/norm.h"
#include "weights/linear.h"

namespace quire {

enum class Scoring : int32_t { kSoftmax = 0, kSigmoid = 1 };

// A row chooses the `top_k` experts whose score + selection_bias is largest, or without a bias and groups whose logit
// is; of equals the first. With more than one group only those of the `kept_groups` whose `best_of_group` (1 or 2)
// largest values have the largest sum. They weigh their scores, divided where `normalised` by the sum of the chosen
// ones, of at least `least_sum` and with `epsilon`, times `scale`, times the expert's own scale.
struct Routing {
  const Linear* weight;         // columns -> experts, or several times as many, whose logits are added up
  const float* selection_bias;  // [experts], or null
  const float* expert_scales;   // [experts], or null
  const Norm* norm;             // of the router's own rows; null: it reads those that the experts read
  int32_t top_k;
  Scoring scoring;
  int32_t groups;
  int32_t kept_groups;
  int32_t best_of_group;
  int32_t normalised;
  float least_sum;
  float epsilon;
  float scale;
};

// The matrices of all experts stand one below the other, each filled up to whole panels.
struct Experts {
  const Linear* gate_up;  // a gate-up pair
  const Linear* down;
  int64_t count;
  int64_t inner;  // columns of down
  Epilogue activation;
};

// The experts of one row, best first, and their weights, from its logits [count]. `scratch` has room for
// routing_floats(count).
void route_row(const Routing& routing, const float* logits, int64_t count, float* scratch, int32_t* index,
               float* weights);

// Whole vectors, each for scores, what decides, the groups' sums and places.
constexpr int64_t kRoutingParts = 4;
constexpr int64_t routing_floats(int64_t count) { return kRoutingParts * ((count + kLanes - 1) / kLanes * kLanes); }

}  // namespace quire
