#pragma once
// Code as the driver gets it: images, and the JIT options of a load or of the linker. Threads: one at a time.

#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "server/fatbin/fatbin.h"
#include "server/worker/session.h"

namespace gpupool::server {

// What the driver is handed: the bytes, or the fatbin wrapper they came in, rebuilt around them. A fatbin's
// own lengths must not lead the driver past the bytes that were sent. kind 2, a device-linked program:
// several fatbins in one image, the linked one first, then those it was linked from.
class DriverImage {
 public:
  DriverImage(std::shared_ptr<Image> image, unsigned kind) : image_(std::move(image)) {
    auto bytes = image_->bytes();
    if (kind == 0) {
      bool isFatbin = bytes.size() >= 4 && std::memcmp(bytes.data(), &fatbin::kMagic, 4) == 0;
      if (!isFatbin || fatbin::fits(bytes)) pointer_ = bytes.data();
      parts_ = {bytes};
    } else if (kind == 1 ? fatbin::fits(bytes) : readLinked(bytes)) {
      if (kind == 1) parts_ = {bytes};
      wrapper_.data = parts_[0].data();
      pointer_ = &wrapper_;
    }
  }
  DriverImage(const DriverImage&) = delete;  // the driver may hold pointers into it
  DriverImage& operator=(const DriverImage&) = delete;

  const void* pointer() const { return pointer_; }  // null: the image is malformed
  Image& image() const { return *image_; }
  bool mayPrint(unsigned architecture) const {
    for (auto part : parts_)
      if (fatbin::mayPrint(part, architecture)) return true;
    return false;
  }

 private:
  bool readLinked(std::span<const std::byte> bytes) {
    if (!Images::readLinked(bytes, parts_)) return false;
    for (size_t i = 1; i < parts_.size(); ++i) linked_.push_back(parts_[i].data());
    linked_.push_back(nullptr);
    wrapper_.version = 2;
    wrapper_.auxiliary = linked_.data();
    return true;
  }

  std::shared_ptr<Image> image_;
  fatbin::Wrapper wrapper_;
  std::vector<std::span<const std::byte>> parts_;
  std::vector<const void*> linked_;
  const void* pointer_ = nullptr;
};

// Options whose value is a number. The others' are places the driver reads or writes: a client has none here.
inline bool isNumberOption(CUjit_option option) {
  switch (option) {
    case CU_JIT_WALL_TIME:
    case CU_JIT_INFO_LOG_BUFFER:
    case CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES:
    case CU_JIT_ERROR_LOG_BUFFER:
    case CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES:
    case CU_JIT_GLOBAL_SYMBOL_NAMES:
    case CU_JIT_GLOBAL_SYMBOL_ADDRESSES:
    case CU_JIT_REFERENCED_KERNEL_NAMES:
    case CU_JIT_REFERENCED_VARIABLE_NAMES:
      return false;
    default:
      return option >= 0 && option < CU_JIT_NUM_OPTIONS;
  }
}

// JIT options with the log buffers added; values are integers in pointers' clothes.
struct JitOptions {
  std::vector<CUjit_option> names;
  std::vector<void*> values;
  bool good = true;  // false: not to be handed to the driver
  template <class Options, class Values>
  JitOptions(Options& options, Values& numbers) {
    good = options.size() == numbers.size();
    for (size_t i = 0; good && i < options.size(); ++i) {
      good = isNumberOption(options[i]);
      names.push_back(options[i]);
      values.push_back(reinterpret_cast<void*>(numbers[i]));
    }
  }
  void log(CUjit_option buffer, CUjit_option size, std::vector<char>& text, bool wanted) {
    if (!wanted || text.size() < 2) return;
    names.push_back(buffer);
    values.push_back(text.data());
    names.push_back(size);
    values.push_back(reinterpret_cast<void*>(text.size() - 1));
  }
};

}  // namespace gpupool::server
