#include "runtime/commit.h"

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "ops.h"
#include "runtime/context.h"

namespace quire {
namespace {

// One huge page: while pages are committed, nobody else can change the process's mappings.
constexpr int64_t kChunk = 2 << 20;

#if !defined(MADV_POPULATE_WRITE)
constexpr int MADV_POPULATE_WRITE = 23;  // Linux 5.14; an older kernel refuses it
#endif

}  // namespace

void Committer::start(char* data, int64_t bytes) {
  stop();
  stopping_ = false;
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t before = reinterpret_cast<intptr_t>(data) % page;  // the pages at both ends may be shared with others
  thread_ = std::thread([this, begin = data - before, size = bytes + before] {
    const sched_param none{};
    sched_setscheduler(0, SCHED_IDLE, &none);
    for (int64_t at = 0; at < size && !stopping_; at += kChunk) {
      const size_t length = static_cast<size_t>(std::min(kChunk, size - at));
      if (madvise(begin + at, length, MADV_POPULATE_WRITE) != 0) return;
    }
  });
}

void Committer::stop() {
  stopping_ = true;
  if (thread_.joinable()) thread_.join();
}

QUIRE_API int32_t quire_commit(Context* context, char* data, int64_t bytes) {
  return guarded(context, [&] { context->committer.start(data, bytes); });
}

}  // namespace quire
