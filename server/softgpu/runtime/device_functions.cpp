// The functions of the CUDA runtime that kernels call: printf, assert, malloc and free.
#include <array>
#include <bit>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "server/softgpu/engine.h"
#include "server/softgpu/runtime/calls.h"
#include "server/softgpu/runtime/memory.h"
#include "server/softgpu/runtime/worker.h"

namespace gpupool::softgpu::runtime {
namespace {

constexpr size_t kMaxText = 1 << 16;
constexpr size_t kMaxOutput = 64 << 20;  // of text nobody took yet: beyond it, text is dropped

std::mutex outputMutex;
// Never destroyed: programs synchronise and release contexts in their exit handlers.
std::string& output = *new std::string;

void emit(const std::string& text) {
  std::lock_guard lock(outputMutex);
  if (output.size() + text.size() <= kMaxOutput) output += text;
}

// Reads device memory; a fault in here ends the grid, so nothing may be held meanwhile.
template <typename T>
T readDevice(uint64_t address) {
  if (!isVisible(address)) faultAddress(address, 0);
  T value;
  std::memcpy(&value, reinterpret_cast<const void*>(address), sizeof value);
  return value;
}

void readText(uint64_t address, std::string& into) {
  into.clear();
  for (char c; into.size() < kMaxText && (c = readDevice<char>(address)) != '\0'; ++address) into += c;
}

// One directive of a format, "%-8.3lf", and what it takes from the packed arguments.
struct Directive {
  std::string text;  // without length modifiers
  char conversion = 0;
  bool wide = false;  // 8 bytes
};

class Formatter {
 public:
  Formatter(const std::string& format, uint64_t arguments) : format_(format), at_(arguments) {}

  uint32_t run(std::string& out) {
    for (size_t i = 0; i < format_.size();) {
      if (format_[i] != '%') {
        out += format_[i++];
      } else if (i + 1 < format_.size() && format_[i + 1] == '%') {
        out += '%';
        i += 2;
      } else {
        i = directive(i, out);
      }
    }
    return count_;
  }

 private:
  template <typename T>
  T next() {
    at_ = (at_ + sizeof(T) - 1) & ~(sizeof(T) - 1);
    T value = readDevice<T>(at_);
    at_ += sizeof(T);
    ++count_;
    return value;
  }

  size_t directive(size_t i, std::string& out) {
    Directive one;
    one.text = "%";
    int longs = 0;
    size_t start = i++;
    for (; i < format_.size(); ++i) {
      char c = format_[i];
      if (c == '*') {
        one.text += std::to_string(next<int32_t>());
      } else if (std::strchr("-+ #0123456789.", c) != nullptr) {
        one.text += c;
      } else if (c == 'l') {
        ++longs;
      } else if (std::strchr("jzt", c) != nullptr) {
        longs = 2;
      } else if (c == 'h') {
        one.text += c;
      } else {
        break;
      }
    }
    if (i == format_.size()) {
      out += format_.substr(start);
      return i;
    }
    one.conversion = format_[i];
    one.wide = longs > 0;
    convert(one, out);
    return i + 1;
  }

  template <typename T>
  static void print(std::string& out, const std::string& format, T value) {
    std::array<char, 256> small;
    int length = std::snprintf(small.data(), small.size(), format.c_str(), value);
    if (length < 0) return;
    if (static_cast<size_t>(length) < small.size()) {
      out.append(small.data(), static_cast<size_t>(length));
    } else if (static_cast<size_t>(length) < kMaxText) {
      std::string large(static_cast<size_t>(length) + 1, '\0');
      std::snprintf(large.data(), large.size(), format.c_str(), value);
      out.append(large.data(), static_cast<size_t>(length));
    }
  }

  void convert(const Directive& one, std::string& out) {
    switch (one.conversion) {
      case 'd':
      case 'i':
        if (one.wide)
          return print(out, one.text + "ll" + one.conversion, static_cast<long long>(next<int64_t>()));
        return print(out, one.text + one.conversion, next<int32_t>());
      case 'u':
      case 'x':
      case 'X':
      case 'o':
        if (one.wide)
          return print(out, one.text + "ll" + one.conversion,
                       static_cast<unsigned long long>(next<uint64_t>()));
        return print(out, one.text + one.conversion, next<uint32_t>());
      case 'c':
        return print(out, one.text + 'c', static_cast<int>(next<int32_t>()));
      case 'p':
        return print(out, one.text + 'p', reinterpret_cast<void*>(next<uint64_t>()));
      case 's': {
        uint64_t address = next<uint64_t>();
        if (address == 0)
          text_ = "(null)";
        else
          readText(address, text_);
        return print(out, one.text + 's', text_.c_str());
      }
      case 'e':
      case 'E':
      case 'f':
      case 'F':
      case 'g':
      case 'G':
      case 'a':
      case 'A':
        return print(out, one.text + one.conversion, next<double>());
      default:
        out += one.text + one.conversion;
    }
  }

  const std::string& format_;
  uint64_t at_;
  uint32_t count_ = 0;
  static thread_local std::string text_;
};
thread_local std::string Formatter::text_;

// Texts live here while device memory is read, so that a fault in between loses nothing.
thread_local std::string scratch[4];

// ---- the heap: blocks of power-of-two sizes, a free list each ----
constexpr uint64_t kHeapReserve = uint64_t{32} << 30;
constexpr uint64_t kMagic = 0x67707568656170aa;

struct Heap {
  struct Header {
    uint64_t magic;
    uint64_t sizeClass;
  };
  std::mutex mutex;
  uint64_t base = 0;
  uint64_t top = 0;
  uint64_t limit = 8 << 20;
  uint64_t used = 0;
  std::array<uint64_t, 48> free{};  // first free block of each class; the next is stored in the block

  uint64_t allocate(uint64_t bytes) {
    std::lock_guard lock(mutex);
    if (bytes == 0 || bytes > limit || used + bytes > limit) return 0;
    if (base == 0) base = top = mapVisible(kHeapReserve);
    if (base == 0) return 0;
    auto sizeClass = static_cast<unsigned>(std::bit_width(bytes + sizeof(Header) - 1));
    if (sizeClass < 5) sizeClass = 5;
    uint64_t block = free[sizeClass];
    if (block != 0) {
      free[sizeClass] = *reinterpret_cast<uint64_t*>(block + sizeof(Header));
    } else {
      if (top + (uint64_t{1} << sizeClass) > base + kHeapReserve) return 0;
      block = top;
      top += uint64_t{1} << sizeClass;
    }
    used += uint64_t{1} << sizeClass;
    *reinterpret_cast<Header*>(block) = {kMagic, sizeClass};
    return block + sizeof(Header);
  }

  bool release(uint64_t address) {
    std::lock_guard lock(mutex);
    if (address < base + sizeof(Header) || address >= top || address % 16 != 0) return false;
    auto* header = reinterpret_cast<Header*>(address - sizeof(Header));
    if (header->magic != kMagic || header->sizeClass >= free.size()) return false;
    header->magic = 0;
    used -= uint64_t{1} << header->sizeClass;
    *reinterpret_cast<uint64_t*>(address) = free[header->sizeClass];
    free[header->sizeClass] = address - sizeof(Header);
    return true;
  }
};

Heap& heap() {
  static Heap* instance = new Heap;
  return *instance;
}

struct HeapCall {
  uint64_t value;
  uint64_t result;
};

}  // namespace

uint32_t devicePrintf(ThreadContext*, uint64_t format, uint64_t arguments) {
  readText(format, scratch[0]);
  scratch[1].clear();
  uint32_t count = Formatter(scratch[0], arguments).run(scratch[1]);
  emit(scratch[1]);
  return count;
}

void deviceAssert(ThreadContext* thread, uint64_t message, uint64_t file, uint32_t line, uint64_t function) {
  readText(message, scratch[0]);
  readText(file, scratch[1]);
  readText(function, scratch[2]);
  const BlockContext& block = *thread->block;
  char place[160];
  std::snprintf(place, sizeof place, ": block: [%u,%u,%u], thread: [%u,%u,%u] Assertion `", block.block[0],
                block.block[1], block.block[2], thread->tid[0], thread->tid[1], thread->tid[2]);
  scratch[3] =
      scratch[1] + ":" + std::to_string(line) + ": " + scratch[2] + place + scratch[0] + "` failed.\n";
  emit(scratch[3]);
  Worker::current()->abandon(Outcome::assertion);
}

uint64_t deviceMalloc(ThreadContext*, uint64_t bytes) {
  HeapCall call{bytes, 0};
  Worker::current()->callOnHost(
      [](void* argument) {
        auto* one = static_cast<HeapCall*>(argument);
        one->result = heap().allocate(one->value);
      },
      &call);
  return call.result;
}

void deviceFree(ThreadContext*, uint64_t address) {
  if (address == 0) return;
  HeapCall call{address, 0};
  Worker::current()->callOnHost(
      [](void* argument) {
        auto* one = static_cast<HeapCall*>(argument);
        one->result = heap().release(one->value);
      },
      &call);
  if (call.result == 0) faultTrap();
}

}  // namespace gpupool::softgpu::runtime

namespace gpupool::softgpu {

std::string takeOutput() {
  std::lock_guard lock(runtime::outputMutex);
  return std::exchange(runtime::output, {});
}

void setHeapLimit(uint64_t bytes) {
  std::lock_guard lock(runtime::heap().mutex);
  runtime::heap().limit = std::min(bytes, runtime::kHeapReserve);
}

uint64_t heapBytesInUse() {
  std::lock_guard lock(runtime::heap().mutex);
  return runtime::heap().used;
}

}  // namespace gpupool::softgpu
