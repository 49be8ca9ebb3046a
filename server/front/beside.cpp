#include "server/front/beside.h"

#include <thread>

#include "base/signals.h"

namespace gpupool::server {

void startBeside(std::function<void()> work) {
  SignalsBlocked blocked;
  std::thread(std::move(work)).detach();
}

}  // namespace gpupool::server
