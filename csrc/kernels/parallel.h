// How a kernel divides its work: the caller brings the threads.
#pragma once

#include <cstdint>

namespace zerocore::kernels {

// Runs body(begin, end) over disjoint pieces that cover [0, count), in any order and on any
// threads, and returns when all are done. A piece has at least `grain` items, except perhaps one.
struct Parallel {
  using Body = void (*)(const void* state, int64_t begin, int64_t end);
  using Run = void (*)(void* context, int64_t count, int64_t grain, Body body, const void* state);

  Run run;
  void* context;

  template <class Function>
  void operator()(int64_t count, int64_t grain, const Function& function) const {
    if (count <= 0) {
      return;
    }
    const Body body = [](const void* state, int64_t begin, int64_t end) {
      (*static_cast<const Function*>(state))(begin, end);
    };
    run(context, count, grain, body, &function);
  }
};

// Everything on the calling thread, in one piece.
inline Parallel serial() {
  return Parallel{[](void*, int64_t count, int64_t, Parallel::Body body, const void* state) {
                    body(state, 0, count);
                  },
                  nullptr};
}

}  // namespace zerocore::kernels
