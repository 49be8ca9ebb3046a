#pragma once
// What a server knows of the memory that sessions share, in their workers' keeping: its next life has it from
// them again. A worker gets a *receipt* for each piece that it has offered or opened. It is not trusted: a
// receipt is sealed with a key that only the server has, in its state file, and what it says was so once. A
// worker that shows one for what it has given up meanwhile delays the end of that, and gains nothing.
//
// Threads: any.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "schema/id.h"

namespace gpupool::server {

struct SharedPiece {
  using AccountName = std::pair<Id, uint64_t>;  // as SessionTable's
  uint64_t id = 0;                              // its alone, in all lives of this server
  AccountName account;
  uint64_t session = 0, piece = 0;  // its owner's number, and that one's own of it
  uint32_t place = 0;               // as its owner's lease counts
  uint64_t bytes = 0;
  std::string device;  // its uuid; empty: it is host memory
  bool operator==(const SharedPiece&) const = default;
};

class ShareReceipts {
 public:
  explicit ShareReceipts(std::vector<std::byte> key) : key_(std::move(key)) {}
  std::vector<std::byte> write(const SharedPiece& piece) const;
  // Nothing: this server has not written it.
  std::optional<SharedPiece> read(std::span<const std::byte> receipt) const;

 private:
  std::vector<std::byte> key_;
};

}  // namespace gpupool::server
