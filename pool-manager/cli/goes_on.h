#pragma once
// For commands whose order goes on where it is carried out when they end: a signal that ends the command, as
// Ctrl-C does, prints one line that says so. One at a time.

#include <string>

namespace gpupool::cli {

class GoesOn {
 public:
  // what: "lease 3f2a91c4 goes on being moved".
  explicit GoesOn(const std::string& what);
  ~GoesOn();
  GoesOn(const GoesOn&) = delete;
  GoesOn& operator=(const GoesOn&) = delete;
};

}  // namespace gpupool::cli
