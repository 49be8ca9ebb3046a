#pragma once
// The connection to the lease's holder (schema/holder.h): one question, one datagram. Not for two threads at
// once.

#include <chrono>
#include <cstdint>
#include <string>

#include "client/nvml/api.h"
#include "schema/holder.h"
#include "schema/nvml_figures.h"

namespace gpupool::nvml {

struct Heard {
  holder::Status status = holder::Status::internal;
  std::chrono::milliseconds age{0};
  bool figured = false;  // figures is filled
};

class Link {
 public:
  explicit Link(std::chrono::milliseconds bound) : bound_(bound) {}
  ~Link() { close(); }
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  // name: GPUPOOL_HOLDER. Connects if it is not connected. NVML_SUCCESS: the holder has answered, whatever it
  // says. DRIVER_NOT_LOADED: there is no holder. GPU_IS_LOST: it ended meanwhile. TIMEOUT: it has not
  // answered within the bound. LIB_RM_VERSION_MISMATCH: it is another build's. After a failure the next
  // question connects anew.
  nvmlReturn_t ask(const std::string& name, uint32_t device, std::chrono::milliseconds maxAge, Heard& heard,
                   schema::NvmlFigures& figures);
  void close();

 private:
  using Clock = std::chrono::steady_clock;
  nvmlReturn_t connect(const std::string& name);
  nvmlReturn_t answer(uint32_t number, Clock::time_point until, Heard& heard, schema::NvmlFigures& figures);

  std::chrono::milliseconds bound_;
  int socket_ = -1;
  uint32_t number_ = 0;
};

}  // namespace gpupool::nvml
