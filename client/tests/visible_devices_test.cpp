// The cases with one device are what driver 580.159 answered; those with several follow the programming
// guide.
#include "client/visible_devices.h"

#include <string>

#include "catch.h"

using namespace gpupool::client;

namespace {

CUuuid uuid(std::initializer_list<int> bytes) {
  CUuuid made{};
  int i = 0;
  for (int byte : bytes) made.bytes[i++] = static_cast<char>(byte);
  return made;
}
const CUuuid kDevices[] = {
    uuid({0x79, 0xa4, 0xe9, 0x41, 0xca, 0x28, 0xa1, 0x8b, 0x1a, 0x8e, 0xe8, 0x0c, 0x4f, 0x34, 0xda, 0x30}),
    uuid({0x79, 0xb0, 0xe9, 0x41, 0xca, 0x28, 0xa1, 0x8b, 0x1a, 0x8e, 0xe8, 0x0c, 0x4f, 0x34, 0xda, 0x30}),
    uuid({0x11, 0xb0})};
const std::string kFirst = "GPU-79a4e941-ca28-a18b-1a8e-e80c4f34da30";

std::string ask(const char* value, size_t count) {
  std::vector<int> chosen;
  const CUresult result = visibleDevices(value, std::span(kDevices, count), &chosen);
  if (result != CUDA_SUCCESS) return std::to_string(static_cast<int>(result));
  std::string text = "[";
  for (int device : chosen) text += std::to_string(device);
  return text + "]";
}
std::string one(const std::string& value) { return ask(value.c_str(), 1); }
std::string three(const std::string& value) { return ask(value.c_str(), 3); }

}  // namespace

TEST_CASE("visible devices: one device, as measured") {
  CHECK(ask(nullptr, 1) == "[0]");
  for (const char* value :
       {"0", "0,1", "0,abc", " 0", "0 ", "0x0", "00", "+0", "0,-1", "0,", "0abc", "0;1"}) {
    INFO(value);
    CHECK(one(value) == "[0]");
  }
  for (const char* value :
       {"", "-1", "1,0", "1", "abc", ",0", "NoDevFiles", "GPU-", "MIG-", "MIG-8", "MIG-GPU-79a4"}) {
    INFO(value);
    CHECK(one(value) == "100");
  }
  CHECK(one("0,0") == "101");
  CHECK(one("0 ,0") == "101");
  CHECK(one(kFirst) == "[0]");
  CHECK(one("GPU-79a4") == "[0]");
  CHECK(one("GPU-7") == "[0]");
  CHECK(one("MIG-79a4") == "[0]");
  CHECK(one(kFirst + ",MIG-7") == "101");
  CHECK(one("mig-7") == "100");
  CHECK(one("GPU-79A4E941-CA28-A18B-1A8E-E80C4F34DA30") == "[0]");
  CHECK(one("gpu" + kFirst.substr(3)) == "100");
  CHECK(one("0," + kFirst) == "[0]");
  CHECK(one(kFirst + ",0") == "[0]");
  CHECK(one(kFirst + "," + kFirst) == "101");
  CHECK(one(kFirst + "x") == "[0]");
  CHECK(one(kFirst + " ") == "[0]");
}

TEST_CASE("visible devices: several") {
  CHECK(ask(nullptr, 3) == "[012]");
  CHECK(three("2,0") == "[20]");
  CHECK(three("1,-1,0") == "[1]");
  CHECK(three("0,5,1") == "[0]");
  CHECK(three("2,1,2") == "101");
  CHECK(three("GPU-79") == "100");  // begins two of them
  CHECK(three("GPU-11,GPU-79b") == "[21]");
  CHECK(three("GPU-11,GPU-79") == "[2]");
  CHECK(ask(nullptr, 0) == "100");
}

TEST_CASE("visible devices: what names no device of any lease") {
  for (const char* value : {"", "-1", "abc", ",0", "NoDevFiles", "GPU-", "MIG-", "-1,0", "GPU-,GPU-79"}) {
    INFO(value);
    CHECK(namesNoDevice(value));
    CHECK(three(value) == "100");
  }
  CHECK_FALSE(namesNoDevice(nullptr));
  for (const char* value : {"0", "7", "0,-1", " 3", "0x10", "GPU-7", "MIG-79", "0abc"}) {
    INFO(value);
    CHECK_FALSE(namesNoDevice(value));
  }
}

TEST_CASE("visible devices: loading mode and order") {
  CHECK(moduleLoadingMode("EAGER") == CU_MODULE_EAGER_LOADING);
  CHECK(moduleLoadingMode("eager") == CU_MODULE_EAGER_LOADING);
  for (const char* value : {"LAZY", "DEFAULT", "junk", ""})
    CHECK(moduleLoadingMode(value) == CU_MODULE_LAZY_LOADING);
  CHECK(moduleLoadingMode(nullptr) == CU_MODULE_LAZY_LOADING);
  CHECK(checkDeviceOrder(nullptr) == CUDA_SUCCESS);
  CHECK(checkDeviceOrder("PCI_BUS_ID") == CUDA_SUCCESS);
  CHECK(checkDeviceOrder("junk") == CUDA_ERROR_INVALID_DEVICE);
}
