#include "server/tests/fake_suspension.h"

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/descriptor_passing.h"
#include "schema/worker.capnp.h"
#include "server/worker_process.h"

namespace gpupool::server::test {
namespace {

constexpr uint64_t kKept = uint64_t{3} << 20;  // on each device, times its place counted from 1

struct Datagram {
  std::array<std::byte, kMaxDatagram> room;
  ReceivedMessage message;

  explicit Datagram(int socket) { message = receiveWithDescriptors(socket, room); }
  std::span<const std::byte> bytes() const { return std::span(room).first(message.bytes); }
  kj::Array<capnp::word> words() const {
    auto words = kj::heapArray<capnp::word>(message.bytes / sizeof(capnp::word));
    std::memcpy(words.begin(), room.data(), words.asBytes().size());
    return words;
  }
};

void send(int socket, capnp::MessageBuilder& message) {
  const auto words = capnp::messageToFlatArray(message);
  const auto bytes = words.asBytes();
  if (::send(socket, bytes.begin(), bytes.size(), MSG_NOSIGNAL) < 0) _exit(8);
}

}  // namespace

FakeSuspension::FakeSuspension(int descriptor) {
  int ends[2];
  server_ = fcntl(descriptor, F_DUPFD_CLOEXEC, 10);
  if (server_ < 0 || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) _exit(8);
  dup2(ends[0], descriptor);
  close(ends[0]);
  shell_ = ends[1];
  thread_ = std::thread([this] { pass(); });
}

FakeSuspension::~FakeSuspension() { thread_.join(); }

void FakeSuspension::pass() {
  pollfd waiting[3] = {{server_, POLLIN, 0}, {shell_, POLLIN, 0}, {-1, POLLIN, 0}};
  for (;;) {
    waiting[2].fd = copier_;
    if (poll(waiting, 3, -1) < 0) continue;
    // The shell's last reports first, whatever has become of the server.
    if (waiting[1].revents != 0 && !passReport()) return;
    if (waiting[0].revents != 0 && !passOrder()) {
      shutdown(shell_, SHUT_WR);
      waiting[0].fd = -1;
    }
    if (waiting[2].revents != 0) copierGone();
  }
}

bool FakeSuspension::passReport() {
  std::lock_guard lock(passing_);
  const Datagram report(shell_);
  if (report.message.bytes <= 0) return false;
  sendWithDescriptors(server_, report.bytes(), report.message.descriptors);
  for (const int descriptor : report.message.descriptors) close(descriptor);
  return true;
}

bool FakeSuspension::passOrder() {
  const Datagram datagram(server_);
  if (datagram.message.bytes <= 0) return false;
  const auto words = datagram.words();
  capnp::FlatArrayMessageReader reader(words);
  const auto order = reader.getRoot<schema::WorkerOrder>();
  const auto& descriptors = datagram.message.descriptors;
  if (order.isSuspend() || order.isResume()) {
    if (descriptors.size() != (order.isSuspend() ? 1 : 0)) _exit(7);
    obey(order.isSuspend(), order.isSuspend() ? descriptors[0] : -1);
    return true;
  }
  if (order.isStart()) {
    devices_ = order.getStart().getDevices().size();
    activityWanted_ = order.getStart().getReportActivity();
  }
  sendWithDescriptors(shell_, datagram.bytes(), descriptors);
  for (const int descriptor : descriptors) close(descriptor);
  return true;
}

void FakeSuspension::obey(bool suspend, int copier) {
  const char refusing = suspend ? 'r' : 'R';
  char how = behaviour_;
  const bool other = (how == 'r' || how == 'R') && how != refusing;
  if (other || (how == 'a' && !suspend)) how = 0;
  if (how != 0 && how != 'a') behaviour_ = 0;
  if (how == refusing || how == 'a') {
    if (copier >= 0) close(copier);
    return report(suspended_, suspend ? "a kernel did not end" : "no memory for 4 GiB", 0);
  }
  if (how == 'd') abort();
  if (how == 'n') return;
  if (how == 'b') {
    ::send(server_, "nonsense", 8, MSG_NOSIGNAL);
    return;
  }
  if (suspend) copier_ = copier;
  if (!askCopier(suspend ? "take" : "bring")) {
    if (!suspend) copierGone();
    close(copier_);  // nothing has left the device
    copier_ = -1;
    return report(false, "the copier is gone", 0);
  }
  if (!suspend) {
    close(copier_);
    copier_ = -1;
  }
  suspended_ = suspend;
  if (suspend) ++times_;
  if (how == 'w') return report(true, "", 7);
  report(suspend, "", devices_);
}

bool FakeSuspension::askCopier(const char* what) {
  char answer[16] = "";
  return ::send(copier_, what, std::strlen(what), MSG_NOSIGNAL) > 0 &&
         ::recv(copier_, answer, sizeof answer - 1, 0) > 0;
}

void FakeSuspension::copierGone() {
  capnp::MallocMessageBuilder message;
  message.initRoot<schema::WorkerReport>().setEnded("the copier is gone");
  send(server_, message);
  _exit(0);
}

void FakeSuspension::report(bool suspended, const std::string& error, size_t devices) {
  capnp::MallocMessageBuilder message;
  auto report = message.initRoot<schema::WorkerReport>().initSuspended();
  report.setSuspended(suspended);
  report.setError(error);
  report.setMovedBytes(suspended ? uint64_t{1} << 30 : 0);
  report.setDrainMs(5);
  report.setMoveMs(7);
  auto kept = report.initKept(static_cast<unsigned>(devices));
  for (unsigned i = 0; i < kept.size(); ++i) kept.set(i, kKept * (i + 1));
  send(server_, message);
}

void FakeSuspension::askForDisturbance() {
  capnp::MallocMessageBuilder message;
  message.initRoot<schema::WorkerReport>().setDisturb();
  send(server_, message);
}

bool FakeSuspension::reportActivity(char letter) {
  if (!activityWanted_) return false;
  capnp::MallocMessageBuilder message;
  message.initRoot<schema::WorkerReport>().setActivity(letter == 'B'   ? schema::Activity::BUSY
                                                       : letter == 'Q' ? schema::Activity::QUIET
                                                                       : schema::Activity::WAITING);
  send(server_, message);
  return true;
}

std::string FakeSuspension::state() const {
  return (suspended_ ? "suspended " : "running ") + std::to_string(times_);
}

void FakeSuspension::flush() {
  for (int unread = 1; unread != 0;) {
    std::lock_guard lock(passing_);
    if (ioctl(shell_, FIONREAD, &unread) != 0) _exit(8);
  }
}

int runFakeCopier() {
  const char* how = std::getenv("GPUPOOL_FAKE_COPIER");
  const std::string_view behaviour = how == nullptr ? "" : how;
  if (behaviour == "crash") abort();
  while (behaviour == "mute") pause();
  capnp::MallocMessageBuilder message;
  auto report = message.initRoot<schema::WorkerReport>();
  if (behaviour == "fail") {
    report.setFailed("no memory can be pinned");
  } else {
    report.setReady();
  }
  send(kControlDescriptor, message);
  if (behaviour == "fail") return 1;
  std::vector<pollfd> waiting{{kControlDescriptor, POLLIN, 0}};
  for (;;) {
    if (poll(waiting.data(), waiting.size(), -1) < 0) continue;
    for (size_t i = 1; i < waiting.size(); ++i) {
      if (waiting[i].revents == 0) continue;
      char asked[16] = "";
      if (::recv(waiting[i].fd, asked, sizeof asked - 1, 0) <= 0) {
        close(waiting[i].fd);
        waiting.erase(waiting.begin() + static_cast<ptrdiff_t>(i--));
        continue;
      }
      if (behaviour == "crash on take") abort();
      const char* answer = std::strcmp(asked, "take") == 0 ? "taken" : "brought";
      ::send(waiting[i].fd, answer, std::strlen(answer), MSG_NOSIGNAL);
    }
    if (waiting[0].revents == 0) continue;
    const Datagram datagram(kControlDescriptor);
    if (datagram.message.bytes <= 0) return 0;
    const auto words = datagram.words();
    capnp::FlatArrayMessageReader reader(words);
    const auto order = reader.getRoot<schema::WorkerOrder>();
    if (datagram.message.descriptors.size() != 1) return 7;
    if (order.isOutlive()) {  // nobody takes this copier over
      close(datagram.message.descriptors[0]);
      continue;
    }
    if (!order.isServe()) return 7;
    waiting.push_back({datagram.message.descriptors[0], POLLIN, 0});
  }
}

}  // namespace gpupool::server::test
