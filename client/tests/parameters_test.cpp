#include "client/parameters.h"

#include <array>
#include <cstring>

#include "catch.h"

using namespace gpupool::client;
using gpupool::schema::ParameterLayout;

TEST_CASE("parameters: values land at their offsets, gaps are zero") {
  ParameterPacker packer;
  const ParameterLayout layout[] = {{0, 8}, {8, 4}, {48, 3}, {16, 1}};
  REQUIRE(packer.setLayout(layout));
  CHECK(packer.count() == 4);
  CHECK(packer.bytes() == 51);
  uint64_t a = 0x1122334455667788;
  uint32_t b = 0xaabbccdd;
  char c[] = {'x', 'y', 'z'};
  uint8_t d = 0x5a;
  void* arguments[] = {&a, &b, c, &d};
  std::array<std::byte, 51> out, expected{};
  out.fill(std::byte{0xff});
  REQUIRE(packer.pack(arguments, out.data()) == CUDA_SUCCESS);
  std::memcpy(&expected[0], &a, 8);
  std::memcpy(&expected[8], &b, 4);
  std::memcpy(&expected[48], c, 3);
  expected[16] = std::byte{0x5a};
  CHECK(out == expected);
}

TEST_CASE("parameters: none, and null pointers") {
  ParameterPacker packer;
  REQUIRE(packer.setLayout({}));
  CHECK(packer.bytes() == 0);
  CHECK(packer.pack(nullptr, nullptr) == CUDA_SUCCESS);
  const ParameterLayout layout[] = {{0, 8}};
  REQUIRE(packer.setLayout(layout));
  std::byte out[8];
  void* arguments[] = {nullptr};
  CHECK(packer.pack(nullptr, out) == CUDA_ERROR_INVALID_VALUE);
  CHECK(packer.pack(arguments, out) == CUDA_ERROR_INVALID_VALUE);
}

TEST_CASE("parameters: layouts that cannot be") {
  ParameterPacker packer;
  const ParameterLayout overlapping[] = {{0, 8}, {4, 4}};
  const ParameterLayout huge[] = {{0, 40000}};
  const ParameterLayout wrapping[] = {{0xfffffff0, 0x20}};
  CHECK_FALSE(packer.setLayout(overlapping));
  CHECK_FALSE(packer.setLayout(huge));
  CHECK_FALSE(packer.setLayout(wrapping));
  const ParameterLayout largest[] = {{0, kMaxParameterBytes}};
  CHECK(packer.setLayout(largest));
}

TEST_CASE("parameters: a buffer in extra") {
  std::byte data[736];
  size_t size = sizeof data;
  const std::byte* buffer = nullptr;
  size_t bytes = 0;
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, data, CU_LAUNCH_PARAM_BUFFER_SIZE, &size,
                   CU_LAUNCH_PARAM_END};
  CHECK(parseLaunchExtra(extra, &buffer, &bytes) == CUDA_SUCCESS);
  CHECK(buffer == data);
  CHECK(bytes == 736);
  void* swapped[] = {CU_LAUNCH_PARAM_BUFFER_SIZE, &size, CU_LAUNCH_PARAM_BUFFER_POINTER, data,
                     CU_LAUNCH_PARAM_END};
  CHECK(parseLaunchExtra(swapped, &buffer, &bytes) == CUDA_SUCCESS);
  void* noSize[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, data, CU_LAUNCH_PARAM_END};
  CHECK(parseLaunchExtra(noSize, &buffer, &bytes) == CUDA_ERROR_INVALID_VALUE);
  void* noBuffer[] = {CU_LAUNCH_PARAM_BUFFER_SIZE, &size, CU_LAUNCH_PARAM_END};
  CHECK(parseLaunchExtra(noBuffer, &buffer, &bytes) == CUDA_ERROR_INVALID_VALUE);
  void* unknown[] = {reinterpret_cast<void*>(7), data, CU_LAUNCH_PARAM_END};
  CHECK(parseLaunchExtra(unknown, &buffer, &bytes) == CUDA_ERROR_INVALID_VALUE);
  size = 40000;
  CHECK(parseLaunchExtra(extra, &buffer, &bytes) == CUDA_ERROR_INVALID_VALUE);
  CHECK(parseLaunchExtra(nullptr, &buffer, &bytes) == CUDA_ERROR_INVALID_VALUE);
  void* endless[20];
  size = 8;
  for (int i = 0; i < 20; i += 2) {
    endless[i] = CU_LAUNCH_PARAM_BUFFER_SIZE;
    endless[i + 1] = &size;
  }
  CHECK(parseLaunchExtra(endless, &buffer, &bytes) == CUDA_ERROR_INVALID_VALUE);
}
