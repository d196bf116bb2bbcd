// The C interface that does not belong to an op: contexts, and what this library was compiled for.
//
// Owns the life of a context. Promises: a null context instead of an exception. Must not know: any op.
#include "gemm/activations.h"
#include "ops.h"
#include "runtime/context.h"
#include "simd/simd.h"

namespace quire {

QUIRE_API const char* quire_variant() { return kVariant; }

#define QUIRE_NAME(member, name, function) name " "
QUIRE_API const char* quire_activations() { return QUIRE_ACTIVATIONS(QUIRE_NAME); }
#undef QUIRE_NAME

QUIRE_API Context* quire_create(int32_t threads, const int32_t* cpus) {
  try {
    return new Context(threads, cpus);
  } catch (...) {
    return nullptr;
  }
}

QUIRE_API void quire_destroy(Context* context) { delete context; }

QUIRE_API void quire_join(Context* context, int32_t rank, int32_t size, GatherColumns gather, void* self) {
  context->ranks = {rank, size, gather, self};
}

QUIRE_API void quire_fetch(Context* context, Fetch fetch) {
  const std::lock_guard<std::mutex> lock(context->busy);
  context->fetch = fetch;
}

QUIRE_API int32_t quire_threads(const Context* context) { return context->pool.size(); }

}  // namespace quire
