#pragma once
// What the fake worker shares: one piece of its first device's memory, which is no memory.

#include <string>

#include "server/worker_process.h"

namespace gpupool::server::test {

class FakeShare {
 public:
  static constexpr size_t kTokenDigits = 64;
  static constexpr uint64_t kPieceBytes = uint64_t{600} << 20;

  explicit FakeShare(WorkerProcess& process) : process_(process) {}
  // O   offer the piece; answers its token, or "refused" and the error's number
  // I   and a token: open it; answers "opened at PLACE", or as above
  // X   close what was opened last
  // F   the piece ends
  // Answers "" to what is none of these.
  std::string order(char letter, int socket);

 private:
  std::string offer();
  std::string open(const std::string& token);

  WorkerProcess& process_;
  uint64_t opening_ = 0;
};

}  // namespace gpupool::server::test
