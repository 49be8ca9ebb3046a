#include "server/front/worker_child.h"

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string_view>

#include "base/descriptor_passing.h"
#include "server/worker_process.h"

namespace gpupool::server {

WorkerMessage::WorkerMessage(kj::Array<capnp::word> words) : words_(kj::mv(words)), reader_(words_) {}

std::vector<std::string> workerEnvironment(char** environment) {
  constexpr std::string_view kKept[] = {
      "PATH=",   "HOME=",    "USER=",         "LANG=",         "LC_",           "TZ=",
      "TMPDIR=", "LD_",      "CUDA_",         "NVIDIA_",       "UCX_",          "RDMA",
      "MLX5_",   "GPUPOOL_", "ASAN_OPTIONS=", "LSAN_OPTIONS=", "TSAN_OPTIONS=", "UBSAN_OPTIONS="};
  constexpr std::string_view kDropped[] = {"TOKEN", "KEY", "SECRET", "PASSWORD", "MANAGER", "GPUPOOL_HOLDER"};
  std::vector<std::string> kept;
  for (char** entry = environment; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::string_view name = text.substr(0, text.find('='));
    bool keep = false;
    for (auto prefix : kKept) keep = keep || text.starts_with(prefix);
    for (auto part : kDropped) keep = keep && name.find(part) == std::string_view::npos;
    if (keep) kept.emplace_back(text);
  }
  return kept;
}

kj::Own<WorkerChild> WorkerChild::start(kj::UnixEventPort& port, const WorkerProgram& program,
                                        const std::vector<std::string>& arguments, WorkerParent& parent) {
  const int executable = program.descriptor();
  int ends[2];
  KJ_SYSCALL(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends));
  kj::AutoCloseFd ours(ends[0]), theirs(ends[1]);
  std::vector<std::string> words{program.path()};
  words.insert(words.end(), arguments.begin(), arguments.end());
  return kj::heap<WorkerChild>(
      port, parent, parent.start(executable, words, workerEnvironment(environ), theirs), kj::mv(ours));
}

WorkerChild::WorkerChild(kj::UnixEventPort& port, WorkerParent& parent, WorkerParent::Process process,
                         kj::AutoCloseFd socket)
    : parent_(parent),
      pid_(process.pid),
      process_(kj::heap<Process>(port, kj::mv(process.descriptor))),
      socket_(kj::mv(socket)),
      socketObserver_(port, socket_, kj::UnixEventPort::FdObserver::OBSERVE_READ),
      buffer_(kj::heapArray<capnp::word>(kMaxDatagram / sizeof(capnp::word))),
      exited_(process_->observer.whenBecomesReadable().then([this] { return reap(); }).fork()) {}

WorkerChild::~WorkerChild() {
  if (gone_) return;
  kill();
  exited_ = nullptr;
  auto gone = process_->observer.whenBecomesReadable();
  gone.then([&parent = parent_, pid = pid_] { parent.reap(pid); })
      .attach(kj::mv(process_))
      .detach([](kj::Exception&&) {});  // the loop ends, and this process: init reaps it
}

WorkerChild::Heard WorkerChild::tryReceive(kj::Maybe<kj::Own<WorkerMessage>>& message) {
  auto received = receiveWithDescriptors(
      socket_, std::as_writable_bytes(std::span(buffer_.begin(), buffer_.size())), MSG_DONTWAIT | MSG_TRUNC);
  kj::AutoCloseFd descriptor;  // a report has one at most
  for (const int one : received.descriptors) descriptor = kj::AutoCloseFd(one);
  const ssize_t bytes = received.bytes;
  if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Heard::nothing;
  if (bytes <= 0) return Heard::end;
  KJ_REQUIRE(static_cast<size_t>(bytes) <= kMaxDatagram && bytes % sizeof(capnp::word) == 0,
             "a worker sent a malformed report", pid_, bytes);
  auto words = kj::heapArray<capnp::word>(bytes / sizeof(capnp::word));
  std::memcpy(words.begin(), buffer_.begin(), bytes);
  auto heard = kj::heap<WorkerMessage>(kj::mv(words));
  const auto report = heard->get();
  if (report.isEnded()) lastWords_ = report.getEnded().cStr();
  if (report.isLost() && lost_) lost_(report.getLost().getOrdinal(), report.getLost().getText().cStr());
  if (report.isMemory() && memory_) memory_(report.getMemory());
  if (report.isShare() && share_) share_(report.getShare(), kj::mv(descriptor));
  if (report.isMoved() && moved_) moved_(report.getMoved());
  message = kj::mv(heard);
  return Heard::message;
}

kj::Promise<kj::Maybe<kj::Own<WorkerMessage>>> WorkerChild::receive() {
  kj::Maybe<kj::Own<WorkerMessage>> message;
  if (tryReceive(message) == Heard::nothing)
    return socketObserver_.whenBecomesReadable().then([this] { return receive(); });
  return kj::mv(message);
}

std::string WorkerChild::lastWords() {
  kj::Maybe<kj::Own<WorkerMessage>> drained;
  while (tryReceive(drained) == Heard::message) continue;
  return lastWords_;
}

bool WorkerChild::send(capnp::MessageBuilder& order, std::span<const int> descriptors) {
  const auto words = capnp::messageToFlatArray(order);
  const auto bytes = words.asBytes();
  KJ_REQUIRE(bytes.size() <= kMaxDatagram && descriptors.size() <= kMostDescriptors, "an order is too large",
             bytes.size(), descriptors.size());
  return sendWithDescriptors(socket_, std::as_bytes(std::span(bytes.begin(), bytes.size())), descriptors,
                             MSG_DONTWAIT) >= 0;
}

bool WorkerChild::sendStop(const std::string& reason) {
  capnp::MallocMessageBuilder message;
  message.initRoot<schema::WorkerOrder>().setStop(reason.empty() ? "stopped" : reason);
  return send(message);
}

bool WorkerChild::hasRead() const {
  int unread = 0;
  return ioctl(socket_, SIOCOUTQ, &unread) != 0 || unread == 0;
}

// Workers of every build know it. No session has the number 0.
void WorkerChild::probe() {
  capnp::MallocMessageBuilder message;
  message.initRoot<schema::WorkerOrder>().setGone(0);
  send(message);
}

void WorkerChild::kill() {
  if (!gone_) parent_.kill(pid_);
}

WorkerChild::Exit WorkerChild::reap() {
  const int status = parent_.reap(pid_);
  gone_ = true;
  if (status < 0) {  // of one that was started before this server nobody knows more than what it has said
    bool said = false;
    kj::runCatchingExceptions([&] { said = !lastWords().empty(); });
    return {said, "has ended"};
  }
  if (WIFSIGNALED(status)) {
    const int number = WTERMSIG(status);
    return {false, "was killed by signal " + std::to_string(number) + " (" + strsignal(number) + ")"};
  }
  const int code = WEXITSTATUS(status);
  if (code == kNotExecuted) return {false, "could not be executed"};
  return {code == 0, "exited with status " + std::to_string(code)};
}

}  // namespace gpupool::server
