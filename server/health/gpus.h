#pragma once
// What the driver's management library says of this server's GPUs.

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "schema/device_sample.h"
#include "schema/nvml_figures.h"

namespace gpupool::health {

struct Event {
  size_t device = 0;  // index into the GPUs
  uint64_t xid = 0;
};

// One thread. Calls may take as long as the driver likes.
class Gpus {
 public:
  virtual ~Gpus() = default;
  virtual size_t count() const = 0;
  // lost: set if the driver says that the GPU does not answer any more.
  virtual DeviceSample sample(size_t device, bool* lost) = 0;
  // What programs may ask of it, but for what lies between two GPUs: all facts, or what changes.
  virtual void facts(size_t device, schema::NvmlFigures& to) = 0;
  virtual void live(size_t device, schema::NvmlFigures& to) = 0;
  virtual schema::FigurePair between(size_t device, size_t other) = 0;
  // Whether NVLink leads from one to the other, directly or by switches. NVML of driver 580 takes 1.6 ms.
  virtual bool joined(size_t device, size_t other) = 0;
  // Critical Xids: waits for the first, at most so long.
  virtual std::vector<Event> events(std::chrono::milliseconds time) = 0;
};

// library: a path, or a name that the loader finds. uuids: "GPU-...", of each GPU. Null, and `why` filled, if
// it cannot serve. A GPU that it does not know has empty samples. The library stays loaded.
std::unique_ptr<Gpus> loadNvml(const std::string& library, const std::vector<std::string>& uuids,
                               std::string* why);

// The library of the driver that was loaded from `driver` (libcuda.so.1): beside it, or else by its name.
std::string nvmlBeside(const std::string& driver);

}  // namespace gpupool::health
