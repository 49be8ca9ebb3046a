#pragma once
// Code images by content (SHA-256 of the bytes): offered by name, sent once, hashed here before anything uses
// them. Bounded: the images of one session may hold kMostBytes at a time.

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "schema/session_calls.h"

namespace gpupool::server {

class Images {
 public:
  static constexpr uint64_t kMostBytes = uint64_t{4} << 30;
  using Bytes = std::shared_ptr<const std::vector<std::byte>>;

  bool have(const schema::ImageName& name);
  // The next piece; pieces come in order, and may come again. CUDA_ERROR_INVALID_VALUE for anything else,
  // INVALID_IMAGE if the finished bytes are not what their name says.
  CUresult append(const schema::ImageName& name, size_t offset, std::span<const std::byte> data);
  Bytes find(const schema::ImageName& name);

 private:
  using Key = std::array<uint64_t, 5>;
  static Key key(const schema::ImageName& name) {
    return {name.words[0], name.words[1], name.words[2], name.words[3], name.bytes};
  }
  std::mutex mutex_;
  std::map<Key, Bytes> whole_;
  std::map<Key, std::vector<std::byte>> partial_;
  uint64_t held_ = 0;
};

}  // namespace gpupool::server
