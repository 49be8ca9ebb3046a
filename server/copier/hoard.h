#pragma once
// With --verify: takes the device memory that a session gave up, fills it with 0xA5 and holds it, so that
// whoever still uses a page of it is seen to. One thread.

#include <cstdint>
#include <map>
#include <vector>

#include "server/copier/devices.h"

namespace gpupool::server {

class CopierHoard {
 public:
  explicit CopierHoard(CopierDevices& devices) : devices_(devices) {}
  ~CopierHoard() { release(); }
  CopierHoard(const CopierHoard&) = delete;
  CopierHoard& operator=(const CopierHoard&) = delete;

  // So many bytes more of the device will be given up soon.
  void expect(uint32_t ordinal, uint64_t bytes) {
    missing_[ordinal] += bytes;
    patience_ = kPatience;
  }
  // True: take() may get more, after a while.
  bool wanting() const { return patience_ > 0 && !missing_.empty(); }
  // Takes what can be had by now of what is expected.
  void take();
  // And expects nothing more.
  void release();
  uint64_t held() const;

 private:
  struct Block {
    CUdeviceptr address = 0;
    uint64_t bytes = 0;
  };
  bool takeBlock(uint32_t ordinal, uint64_t bytes);

  static constexpr int kPatience = 50;  // calls of take() that get nothing
  CopierDevices& devices_;
  std::map<uint32_t, uint64_t> missing_;  // bytes by ordinal
  std::vector<Block> blocks_;
  int patience_ = 0;
};

}  // namespace gpupool::server
