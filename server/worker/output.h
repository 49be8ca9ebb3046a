#pragma once
// Device printf: the driver writes it to this process's stdout at synchronisation points. stdout is a memory
// file here; what arrived since the last look travels to the client with the reply of the synchronisation.

#include <mutex>
#include <string>

namespace gpupool::server {

class Output {
 public:
  // Takes descriptor 1 over. Throws std::runtime_error.
  Output();
  ~Output();
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  // Text written since the last take, at most kMost bytes (the rest next time). Any thread.
  std::string take();
  static constexpr size_t kMost = size_t{512} << 10;

 private:
  std::mutex mutex_;
  int file_ = -1;
  long read_ = 0;
};

}  // namespace gpupool::server
