#pragma once
// What the engine's tests share: loading PTX, memory for globals, launches by name.

#include <sys/mman.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "catch.h"
#include "server/softgpu/engine.h"

namespace gpupool::softgpu::test {

// Device memory: pages in the device window, visible to kernels while the object lives.
class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  uint64_t address() const { return address_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(address_);
  }

 private:
  uint64_t address_ = 0;
  size_t bytes_ = 0;
};

// A loaded program and the memory of its globals.
class Loaded {
 public:
  explicit Loaded(const std::string& ptx) : Loaded(std::vector<std::string>{ptx}) {}
  explicit Loaded(const std::vector<std::string>& sources);
  bool fine() const { return program_ != nullptr; }
  const CompileError& error() const { return error_; }
  const Program& program() const { return *program_; }
  uint64_t global(const std::string& name) const;

  template <typename... Arguments>
  Outcome run(const std::string& kernel, const std::vector<uint32_t>& grid,
              const std::vector<uint32_t>& block, Arguments... arguments) {
    std::vector<std::byte> packed;
    (append(packed, arguments), ...);
    return launch(kernel, grid, block, packed);
  }

  uint32_t dynamicShared = 0;
  bool cooperative = false;

 private:
  template <typename T>
  static void append(std::vector<std::byte>& packed, const T& value) {
    packed.resize((packed.size() + alignof(T) - 1) / alignof(T) * alignof(T));
    packed.resize(packed.size() + sizeof(T));
    std::memcpy(packed.data() + packed.size() - sizeof(T), &value, sizeof(T));
  }
  Outcome launch(const std::string& kernel, const std::vector<uint32_t>& grid,
                 const std::vector<uint32_t>& block, const std::vector<std::byte>& packed);

  CompileError error_;
  std::vector<std::unique_ptr<DeviceMemory>> globals_;
  std::unique_ptr<Program> program_;
};

// A module with one kernel `test(.param .u64 in, .param .u64 out)`: %in and %out hold the addresses, %i the
// thread's index in its block. Registers %r0-31, %rs0-31, %rd0-31, %f0-31, %fd0-31, %p0-7, %h (b16) and %hh
// (b32).
std::string kernelOf(const std::string& body, const std::string& module = "");

// Runs that kernel's body for each input: `body` reads [%src + ...] and writes [%dst + ...], the thread's own
// places.
template <typename In, typename Out>
std::vector<Out> mapKernel(const std::string& body, const std::vector<In>& inputs,
                           const std::string& module = "") {
  DeviceMemory from(inputs.size() * sizeof(In) + 16);
  DeviceMemory to(inputs.size() * sizeof(Out) + 16);
  std::memcpy(from.as<void>(), inputs.data(), inputs.size() * sizeof(In));
  std::string prefix = "mul.wide.u32 %rd30, %i, " + std::to_string(sizeof(In)) +
                       "; add.u64 %src, %in, %rd30;\n" + "mul.wide.u32 %rd30, %i, " +
                       std::to_string(sizeof(Out)) + "; add.u64 %dst, %out, %rd30;\n";
  Loaded loaded(kernelOf(prefix + body, module));
  INFO(body);
  INFO(loaded.error().text);
  REQUIRE(loaded.fine());
  REQUIRE(inputs.size() <= 1024);
  REQUIRE(loaded.run("test", {1}, {static_cast<uint32_t>(inputs.size())}, from.address(), to.address()) ==
          Outcome::ok);
  std::vector<Out> result(inputs.size());
  std::memcpy(result.data(), to.as<void>(), result.size() * sizeof(Out));
  return result;
}

std::string readFile(const std::string& path);

}  // namespace gpupool::softgpu::test
