// Does what the sanitizers are there to find, so that tests/sanitizers/run can tell that they would: one
// fault, named by the argument.

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <thread>

namespace {

volatile int sink = 0;

void race() {
  static int shared = 0;
  static std::atomic<bool> done{
      false};  // one after the other, which says nothing of order: at once can be missed
  std::thread other([] {
    ++shared;
    done.store(true, std::memory_order_relaxed);
  });
  while (!done.load(std::memory_order_relaxed)) std::this_thread::yield();
  ++shared;
  other.join();
  sink = shared;
}

void overflow() {
  volatile size_t size = 8;  // so that UBSan, which knows of constant sizes, does not see it first
  char* bytes = static_cast<char*>(std::malloc(size));
  sink = bytes[size];
  std::free(bytes);
}

void leak() {
  void* volatile lost = std::malloc(100);
  lost = nullptr;
  sink = lost == nullptr;
}

void undefined() {
  volatile int most = std::numeric_limits<int>::max();
  sink = most + 1;
}

}  // namespace

int main(int count, char** words) {
  const struct {
    const char* name;
    void (*run)();
  } faults[] = {{"race", race}, {"overflow", overflow}, {"leak", leak}, {"undefined", undefined}};
  for (auto& fault : faults)
    if (count == 2 && std::strcmp(words[1], fault.name) == 0) {
      fault.run();
      return 0;
    }
  std::fputs("usage: known_fault race|overflow|leak|undefined\n", stderr);
  return 2;
}
