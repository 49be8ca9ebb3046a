#pragma once
// From a call's wire id to the function that serves it.

#include <cstdint>
#include <string_view>

#include "server/worker/session.h"

namespace gpupool::server {

struct Handler {
  void (*serve)(Session&, Call&) = nullptr;
  bool beside = false;  // on a thread of its own lane
  bool aside = false;   // on the control thread: may never call the driver, or wait for who does
  std::string_view name;
  bool verified = false;  // a rebuilt session must answer the same
  bool polls = false;     // Frame::kUntilDone means something
};

// Null for an id without a handler: calls the client answers itself never come.
const Handler* findHandler(uint32_t id);

}  // namespace gpupool::server
