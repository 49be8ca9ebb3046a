// What a worker does before its session: its command line, what its driver has, and a context ahead of time.
#include <algorithm>
#include <cstdio>
#include <stdexcept>

#include "base/log.h"
#include "server/arena_mmap.h"
#include "server/driver.h"
#include "server/worker_process.h"

namespace gpupool::server {
namespace {

void checked(const Driver& driver, CUresult result, const char* call) {
  if (result != CUDA_SUCCESS) throw std::runtime_error(std::string(call) + ": " + driver.describe(result));
}

std::string uuidOf(const Driver& driver, CUdevice device) {
  const auto ask = driver.cuDeviceGetUuid_v2 != nullptr ? driver.cuDeviceGetUuid_v2 : driver.cuDeviceGetUuid;
  if (ask == nullptr) throw std::runtime_error("the driver has no cuDeviceGetUuid");
  CUuuid uuid{};
  checked(driver, ask(&uuid, device), "cuDeviceGetUuid");
  return {uuid.bytes, sizeof uuid.bytes};
}

void print(const std::string& driver, std::span<const Device> devices) {
  std::printf("driver %s\n", driver.c_str());
  for (const auto& device : devices) {
    std::printf("device %u: %s, compute %u.%u, %.1f GiB, %s%s\n", device.ordinal, device.name.c_str(),
                device.computeMajor, device.computeMinor,
                static_cast<double>(device.memoryBytes) / (1u << 30), device.pciBusId.c_str(),
                device.software ? ", software" : "");
  }
}

}  // namespace

const char kWorkerUsage[] =
    "usage: gpupool-worker [--driver PATH] [--warm-context ORDINAL] [--client-stall-time MS]\n"
    "                      [--walls off|auto|required|log] [--users FIRST-LAST]\n"
    "                      [--devices none|PCI-ADDRESS,...,rdma] [--module-cache PATH]\n"
    "                      [--disturb SEED | --disturb-moves SEED | --disturb-streams SEED |\n"
    "                       --disturb-kills SEED | --disturb-beginnings SEED]\n"
    "                                                                 started by gpupool-server\n"
    "       gpupool-worker --inventory [--driver PATH]                lists this machine's devices\n"
    "       gpupool-worker --identify                 tells which servers and clients it is for\n"
    "       gpupool-worker --copier --budget BYTES [--driver PATH] [--folder DIR] [--touch-ahead BYTES]\n"
    "       [--verify]                               keeps suspended sessions' memory\n";

WorkerArguments parseWorkerArguments(int count, char** words) {
  WorkerArguments arguments;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    const auto value = [&] {
      if (++i >= count) throw std::runtime_error(word + " needs a value");
      return std::string(words[i]);
    };
    if (word == "--inventory") {
      arguments.inventory = true;
    } else if (word == "--identify") {
      arguments.identify = true;
    } else if (word == "--help") {
      arguments.help = true;
    } else if (word == "--driver") {
      arguments.driver = value();
    } else if (word == "--warm-context") {
      const std::string text = value();
      char* end = nullptr;
      arguments.warmDevice = static_cast<int>(std::strtol(text.c_str(), &end, 10));
      if (text.empty() || *end != '\0' || arguments.warmDevice < 0)
        throw std::runtime_error("--warm-context: '" + text + "' is no device ordinal");
    } else if (word == "--client-stall-time") {
      arguments.clientStallTime = std::chrono::milliseconds(std::strtoll(value().c_str(), nullptr, 10));
    } else if (word == "--walls") {
      const std::string name = value();
      const auto mode = walls::modeNamed(name);
      if (!mode) throw std::runtime_error("--walls: '" + name + "' is not off, auto, required or log");
      arguments.walls = *mode;
    } else if (word == "--devices") {
      arguments.devices = walls::Devices::parse(value());
    } else if (word == "--users") {
      const std::string range = value();
      arguments.users = parseUserRange(range);
      if (!arguments.users) throw std::runtime_error("--users: '" + range + "' is no range of user ids");
    } else if (word == "--module-cache") {
      arguments.moduleCache = value();
    } else if (word == "--disturb" || word == "--disturb-moves" || word == "--disturb-streams" ||
               word == "--disturb-kills" || word == "--disturb-beginnings") {
      arguments.disturbMoves = word == "--disturb-moves";
      arguments.disturbStreams = word == "--disturb-streams";
      arguments.disturbKills = word == "--disturb-kills";
      arguments.disturbBeginnings = word == "--disturb-beginnings";
      arguments.disturb = std::strtoull(value().c_str(), nullptr, 10);
    } else {
      throw std::runtime_error("unknown argument '" + word + "'");
    }
  }
  return arguments;
}

std::vector<Device> listDevices(const Driver& driver) {
  checked(driver, driver.cuInit(0), "cuInit");
  int version = 0, count = 0;
  checked(driver, driver.cuDriverGetVersion(&version), "cuDriverGetVersion");
  checked(driver, driver.cuDeviceGetCount(&count), "cuDeviceGetCount");
  std::vector<Device> devices;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CUdevice device = 0;
    char name[256] = "", pci[64] = "";
    size_t bytes = 0;
    int major = 0, minor = 0;
    checked(driver, driver.cuDeviceGet(&device, ordinal), "cuDeviceGet");
    checked(driver, driver.cuDeviceGetName(name, sizeof name - 1, device), "cuDeviceGetName");
    checked(driver, driver.cuDeviceTotalMem_v2(&bytes, device), "cuDeviceTotalMem");
    const auto attribute = driver.cuDeviceGetAttribute;
    checked(driver, attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device),
            "compute capability");
    checked(driver, attribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device),
            "compute capability");
    if (driver.cuDeviceGetPCIBusId != nullptr) driver.cuDeviceGetPCIBusId(pci, sizeof pci - 1, device);
    devices.push_back({uuidOf(driver, device),
                       name,
                       bytes,
                       static_cast<uint32_t>(major),
                       static_cast<uint32_t>(minor),
                       pci,
                       static_cast<uint32_t>(ordinal),
                       driver.software(),
                       static_cast<uint32_t>(version),
                       {}});
  }
  return devices;
}

void findDevices(const Driver& driver, SessionStart& start) {
  int count = 0;
  checked(driver, driver.cuDeviceGetCount(&count), "cuDeviceGetCount");
  std::vector<std::string> here;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CUdevice device = 0;
    checked(driver, driver.cuDeviceGet(&device, ordinal), "cuDeviceGet");
    here.push_back(uuidOf(driver, device));
  }
  start.ordinals.clear();
  for (const LeasedDevice& leased : start.devices) {
    const auto found = std::find(here.begin(), here.end(), leased.info.uuid);
    if (found == here.end())
      throw std::runtime_error("this worker does not have GPU " + std::to_string(leased.info.ordinal) +
                               " of the server");
    start.ordinals.push_back(static_cast<int>(found - here.begin()));
  }
}

int runInventory(const std::string& driverPath, uint64_t rowsHash) {
  std::optional<WorkerProcess> process;
  if (isControlSocket(kControlDescriptor)) process.emplace(kControlDescriptor, rowsHash);
  try {
    const auto driver = Driver::load(driverPath);
    const auto devices = listDevices(*driver);
    if (!process) {
      print(driver->path(), devices);
      return 0;
    }
    return process->reportDevices(driver->path(), devices) ? 0 : 1;
  } catch (const std::exception& error) {
    if (process) {
      process->reportFailed(error.what());
    } else {
      std::fprintf(stderr, "gpupool-worker: %s\n", error.what());
    }
    return 1;
  }
}

CUcontext warmUp(const Driver& driver, int device) {
  // Before anything else can lie there, and around the context: the driver takes the address pools that
  // module globals are placed in when it creates one.
  if (!reserveGlobalArena())
    GPUPOOL_INFO("no arena for module globals: the session cannot be restored elsewhere");
  const PlaceGlobals guard;
  checked(driver, driver.cuInit(0), "cuInit");
  return device < 0 ? nullptr : contextAhead(driver, device);
}

CUcontext contextAhead(const Driver& driver, int device) {
  const PlaceGlobals guard;
  CUdevice handle = 0;
  CUcontext context = nullptr;
  checked(driver, driver.cuDeviceGet(&handle, device), "cuDeviceGet");
  // Retained until the process ends: the session finds the context there.
  checked(driver, driver.cuDevicePrimaryCtxRetain(&context, handle), "cuDevicePrimaryCtxRetain");
  return context;
}

}  // namespace gpupool::server
