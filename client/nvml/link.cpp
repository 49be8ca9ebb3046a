#include "client/nvml/link.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <vector>

namespace gpupool::nvml {

using holder::FiguresReply;
using holder::FiguresRequest;

void Link::close() {
  if (socket_ >= 0) ::close(socket_);
  socket_ = -1;
}

// A holder that is stopped and whose queue is full has no room: that is no different from one that does not
// answer.
nvmlReturn_t Link::connect(const std::string& name) {
  sockaddr_un address{};
  const socklen_t size = holder::socketAddress(name.c_str(), address);
  if (size == 0) return NVML_ERROR_DRIVER_NOT_LOADED;
  socket_ = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (socket_ < 0) return NVML_ERROR_OPERATING_SYSTEM;
  if (::connect(socket_, reinterpret_cast<sockaddr*>(&address), size) == 0 && holder::peerIsOurs(socket_))
    return NVML_SUCCESS;
  const bool full = errno == EAGAIN;
  close();
  return full ? NVML_ERROR_TIMEOUT : NVML_ERROR_DRIVER_NOT_LOADED;
}

nvmlReturn_t Link::ask(const std::string& name, uint32_t device, std::chrono::milliseconds maxAge,
                       Heard& heard, schema::NvmlFigures& figures) {
  const auto until = Clock::now() + bound_;
  if (socket_ < 0)
    if (const nvmlReturn_t status = connect(name); status != NVML_SUCCESS) return status;
  FiguresRequest request;
  request.number = ++number_;
  request.device = device;
  request.maxAgeMs = static_cast<uint32_t>(maxAge.count());
  nvmlReturn_t status = NVML_ERROR_GPU_IS_LOST;
  if (::send(socket_, &request, sizeof request, MSG_NOSIGNAL) == ssize_t{sizeof request})
    status = answer(request.number, until, heard, figures);
  else if (errno == EAGAIN)
    status = NVML_ERROR_TIMEOUT;
  if (status != NVML_SUCCESS) close();
  return status;
}

nvmlReturn_t Link::answer(uint32_t number, Clock::time_point until, Heard& heard,
                          schema::NvmlFigures& figures) {
  std::vector<std::byte> datagram(sizeof(FiguresReply) + sizeof figures);
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
    pollfd wait{socket_, POLLIN, 0};
    const int ready = ::poll(&wait, 1, static_cast<int>(std::max<int64_t>(left.count(), 0)));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return NVML_ERROR_TIMEOUT;
    const ssize_t size = ::recv(socket_, datagram.data(), datagram.size(), MSG_TRUNC);
    if (size < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (size <= 0) return NVML_ERROR_GPU_IS_LOST;
    FiguresReply reply;
    if (size < ssize_t{sizeof reply}) return NVML_ERROR_LIB_RM_VERSION_MISMATCH;
    std::memcpy(&reply, datagram.data(), sizeof reply);
    if (reply.magic != holder::kFiguresMagic || reply.version != holder::kVersion)
      return NVML_ERROR_LIB_RM_VERSION_MISMATCH;
    if (reply.number != number) continue;
    heard.status = reply.status;
    heard.age = std::chrono::milliseconds(reply.ageMs);
    heard.figured = reply.bytes != 0;
    const bool whole = size == static_cast<ssize_t>(sizeof reply + reply.bytes);
    if (heard.figured &&
        (!whole || !schema::readFigures({datagram.data() + sizeof reply, reply.bytes}, figures)))
      return NVML_ERROR_LIB_RM_VERSION_MISMATCH;
    return reply.status == holder::Status::mismatch ? NVML_ERROR_LIB_RM_VERSION_MISMATCH : NVML_SUCCESS;
  }
}

}  // namespace gpupool::nvml
