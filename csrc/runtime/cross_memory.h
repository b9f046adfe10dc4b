// Reads the memory of other processes of this machine (Linux: process_vm_readv(2), "cross memory
// attach"): one copy by the kernel, where a message through a socket takes two and wakes threads on
// both sides.
#pragma once

#include <cstdint>

namespace zerocore {

// By which other processes find out whether they can read the memory of this one.
struct Introduction {
  int64_t machine = 0;  // that runs it, and the name space of its process numbers; 0: unknown
  int64_t process = 0;
  int64_t address = 0;  // of `value` in its memory
  int64_t value = 0;
};

// That of this process. Where Linux lets nobody but a process's parents read its memory (Yama's
// scope 1), it allows this to the children of its own parent, which are the ranks of one launcher.
// With ZEROCORE_CROSS_MEMORY=0 in the environment it is one that nobody can read from.
Introduction introduce();

// Whether it is of another process that this one can read from, which is tried.
bool can_read(const Introduction& introduction);

// Copies `bytes` from `address` in a process to `to`. Throws std::system_error if they cannot be
// read, because the process is gone for example.
void read_memory(int64_t process, int64_t address, void* to, int64_t bytes);

}  // namespace zerocore
