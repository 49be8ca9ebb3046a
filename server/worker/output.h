#pragma once
// What kernels print. The driver writes printf's text to this process's stdout when it synchronises, and the
// text of a failed assertion to its stderr when it notices the failure. Both are memory files here; what
// arrived since the last look travels to the client. Everything else on stderr (libraries' complaints) is
// passed on to the stderr this process was started with, where the log goes too.

#include <mutex>
#include <string>

namespace gpupool::server {

class Output {
 public:
  // Takes descriptors 1 and 2 over. Throws std::runtime_error.
  Output();
  ~Output();
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  // Text for the client's stdout written since the last take, at most kMost bytes (the rest next time). Any
  // thread.
  std::string take();
  static constexpr size_t kMost = size_t{512} << 10;

  // Assertions' lines for the client's stderr, at most kMostErrors bytes at a time. Any thread.
  std::string takeErrors();
  static constexpr size_t kMostErrors = size_t{128} << 10;

 private:
  struct Captured {
    int file = -1;
    long read = 0;
    void open(int descriptor);
    std::string take(size_t most);
  };
  std::mutex mutex_;
  Captured text_, errors_;
  int kept_ = -1;  // the stderr of before
};

}  // namespace gpupool::server
