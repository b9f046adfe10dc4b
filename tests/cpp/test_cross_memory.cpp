// Reading the memory of other processes: what is read, whom it is tried with, and what fails.

#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <system_error>
#include <vector>

#include "check.h"
#include "runtime/cross_memory.h"

namespace zerocore::test {
namespace {

// Another process, which has made `values` and then does nothing.
class Child {
 public:
  explicit Child(int64_t count) {
    int pipes[2];
    CHECK(pipe(pipes) == 0);
    process_ = fork();
    if (process_ == 0) {
      std::vector<int32_t> values(static_cast<size_t>(count));
      std::iota(values.begin(), values.end(), 7);
      const Report report{introduce(), reinterpret_cast<int64_t>(values.data())};
      if (write(pipes[1], &report, sizeof(report)) != sizeof(report)) _exit(1);
      while (true) pause();
    }
    char bytes[sizeof(Report)];
    CHECK(read(pipes[0], bytes, sizeof(bytes)) == sizeof(bytes));
    std::memcpy(&report_, bytes, sizeof(bytes));
    close(pipes[0]);
    close(pipes[1]);
  }
  ~Child() { end(); }

  void end() {
    if (process_ == 0) return;
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
    process_ = 0;
  }

  const Introduction& introduction() const { return report_.introduction; }
  int64_t values() const { return report_.values; }

 private:
  struct Report {
    Introduction introduction;
    int64_t values = 0;
  };
  pid_t process_ = 0;
  Report report_;
};

// Whether this machine lets a process read what its own child has.
bool allowed() {
  const Child child(1);
  int32_t value = 0;
  const iovec local{&value, sizeof(value)};
  const iovec remote{reinterpret_cast<void*>(child.values()), sizeof(value)};
  const auto process = static_cast<pid_t>(child.introduction().process);
  return process_vm_readv(process, &local, 1, &remote, 1, 0) == sizeof(value);
}

void test_what_another_process_has_is_read() {
  constexpr int64_t kCount = 3'000'001;
  const Child child(kCount);
  CHECK(can_read(child.introduction()));
  std::vector<int32_t> values(kCount + 1, -1);
  read_memory(child.introduction().process, child.values(), values.data(), kCount * 4);
  for (int64_t i = 0; i < kCount; ++i) CHECK_EQ(values[static_cast<size_t>(i)], i + 7);
  CHECK_EQ(values.back(), -1);
}

void test_only_processes_that_answer_right_are_read() {
  const Child child(1);
  Introduction other = child.introduction();
  other.value += 1;  // some process with the same number
  CHECK(!can_read(other));
  other = child.introduction();
  other.machine += 2;
  CHECK(!can_read(other));
  other = child.introduction();
  other.address = 16;
  CHECK(!can_read(other));
  CHECK(!can_read(Introduction{}));
  CHECK(!can_read(introduce()));  // threads of one process send messages
}

void test_the_environment_switches_it_off() {
  const Child child(1);
  setenv("ZEROCORE_CROSS_MEMORY", "0", 1);
  const Child closed(1);
  CHECK(!can_read(child.introduction()));
  unsetenv("ZEROCORE_CROSS_MEMORY");
  CHECK(!can_read(closed.introduction()));
  CHECK(can_read(child.introduction()));
}

void test_a_process_that_is_gone_is_an_error() {
  Child child(1000);
  const Introduction introduction = child.introduction();
  std::vector<int32_t> values(1000);
  const auto read = [&](int64_t address) {
    read_memory(introduction.process, address, values.data(), 4000);
  };
  CHECK_THROWS(std::system_error, "reading the memory of process", read(16));
  const int64_t address = child.values();
  child.end();
  CHECK(!can_read(introduction));
  CHECK_THROWS(std::system_error, "No such process", read(address));
}

}  // namespace
}  // namespace zerocore::test

int main() {
  if (!zerocore::test::allowed()) {
    std::cerr << "not tested: this machine keeps processes apart\n";
    return 0;
  }
  zerocore::test::test_what_another_process_has_is_read();
  zerocore::test::test_only_processes_that_answer_right_are_read();
  zerocore::test::test_the_environment_switches_it_off();
  zerocore::test::test_a_process_that_is_gone_is_an_error();
}
