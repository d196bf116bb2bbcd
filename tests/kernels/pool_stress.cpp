// Short runs on a pool with as many and more workers than cores: what one piece writes another reads after the wait,
// and a run on all calls each worker once. Built with ThreadSanitizer, which reports what is not ordered.
#include <cstdio>
#include <vector>

#include "runtime/pool.h"

int main() {
  constexpr int64_t kNumbers = 64;
  for (const int threads : {1, 2, 3, 9}) {
    quire::Pool pool(threads, nullptr);
    std::vector<int64_t> written(kNumbers), copied(kNumbers);
    for (int64_t round = 0; round < 5000; ++round) {
      pool.run([&](int worker) {
        quire::Piece piece;
        while (pool.first.take(worker, kNumbers, 5, &piece)) {
          for (int64_t at = piece.begin; at < piece.end; ++at) written[static_cast<size_t>(at)] = round + at;
          pool.first.finish(piece.end - piece.begin);
        }
        pool.first.wait(kNumbers);
        while (pool.second.take(worker, kNumbers, 1, &piece)) {
          copied[static_cast<size_t>(piece.begin)] = written[static_cast<size_t>(kNumbers - 1 - piece.begin)];
        }
      });
      for (int64_t i = 0; i < kNumbers; ++i) {
        if (copied[static_cast<size_t>(i)] != round + kNumbers - 1 - i) return std::puts("a piece is missing"), 1;
      }
      if (round % 50 != 0) continue;
      std::vector<int> calls(static_cast<size_t>(threads));
      pool.run_on_all([&](int worker) { ++calls[static_cast<size_t>(worker)]; });
      for (const int number : calls) {
        if (number != 1) return std::puts("a worker was not called once"), 1;
      }
    }
  }
  std::puts("done");
  return 0;
}
