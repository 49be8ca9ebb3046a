#include "server/front/worker_child.h"

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string_view>

#include "base/descriptor_passing.h"
#include "server/worker_process.h"

namespace gpupool::server {
namespace {

kj::AutoCloseFd openProcess(pid_t pid) {
  int descriptor;
  KJ_SYSCALL(descriptor = static_cast<int>(syscall(SYS_pidfd_open, pid, 0)), "pidfd_open (needs Linux 5.3)");
  fcntl(descriptor, F_SETFD, FD_CLOEXEC);
  return kj::AutoCloseFd(descriptor);
}

// Runs in the forked child: async-signal-safe calls only.
[[noreturn]] void becomeWorker(int program, char* const* arguments, char* const* environment, int control,
                               int nothing, pid_t parent) {
  setsid();
  prctl(PR_SET_PDEATHSIG, kServerDiedSignal);
  if (getppid() != parent) _exit(126);  // it died before the line above
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  signal(SIGTERM, SIG_DFL);
  signal(kServerDiedSignal, SIG_DFL);
  signal(SIGINT, SIG_DFL);
  signal(SIGPIPE, SIG_IGN);
  dup2(nothing, STDIN_FILENO);
  dup2(STDERR_FILENO, STDOUT_FILENO);
  if (control == kControlDescriptor) {
    fcntl(control, F_SETFD, 0);
  } else {
    dup2(control, kControlDescriptor);
  }
#ifdef SYS_close_range
  constexpr unsigned kCloseOnExec = 4;  // CLOSE_RANGE_CLOEXEC; everything of ours is marked already
  syscall(SYS_close_range, kControlDescriptor + 1, ~0u, kCloseOnExec);
#endif
  syscall(SYS_execveat, program, "", arguments, environment, AT_EMPTY_PATH);
  if (errno == ENOENT) execve(arguments[0], arguments, environment);  // a script: its interpreter opens it
  _exit(127);
}

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> list;
  list.reserve(texts.size() + 1);
  for (const auto& text : texts) list.push_back(const_cast<char*>(text.c_str()));
  list.push_back(nullptr);
  return list;
}

}  // namespace

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
                                        const std::vector<std::string>& arguments) {
  const int executable = program.descriptor();
  int ends[2];
  KJ_SYSCALL(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends));
  kj::AutoCloseFd ours(ends[0]), theirs(ends[1]);
  int null;
  KJ_SYSCALL(null = open("/dev/null", O_RDONLY | O_CLOEXEC));
  kj::AutoCloseFd nothing(null);

  std::vector<std::string> words{program.path()};
  words.insert(words.end(), arguments.begin(), arguments.end());
  const auto variables = workerEnvironment(environ);
  auto argumentList = pointers(words), environmentList = pointers(variables);
  const pid_t parent = getpid();
  pid_t pid;
  KJ_SYSCALL(pid = fork());
  if (pid == 0)
    becomeWorker(executable, argumentList.data(), environmentList.data(), theirs, nothing, parent);
  try {
    return kj::heap<WorkerChild>(port, pid, openProcess(pid), kj::mv(ours));
  } catch (...) {
    ::kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    throw;
  }
}

WorkerChild::WorkerChild(kj::UnixEventPort& port, pid_t pid, kj::AutoCloseFd process, kj::AutoCloseFd socket)
    : pid_(pid),
      process_(kj::heap<Process>(port, kj::mv(process))),
      socket_(kj::mv(socket)),
      socketObserver_(port, socket_, kj::UnixEventPort::FdObserver::OBSERVE_READ),
      buffer_(kj::heapArray<capnp::word>(kMaxDatagram / sizeof(capnp::word))),
      exited_(process_->observer.whenBecomesReadable().then([this] { return reap(); }).fork()) {}

WorkerChild::~WorkerChild() {
  if (gone_) return;
  kill();
  exited_ = nullptr;
  auto gone = process_->observer.whenBecomesReadable();
  gone.then([pid = pid_] { waitpid(pid, nullptr, WNOHANG); })
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

void WorkerChild::kill() {
  if (gone_) return;
  ::kill(-pid_, SIGKILL);
  ::kill(pid_, SIGKILL);  // it may not have reached setsid yet
}

WorkerChild::Exit WorkerChild::reap() {
  // Helpers the worker started (JIT compilers, ...) go with it; its pid is ours until it is reaped.
  ::kill(-pid_, SIGKILL);
  int status = 0;
  pid_t result;
  do {
    result = waitpid(pid_, &status, 0);
  } while (result < 0 && errno == EINTR);
  gone_ = true;
  if (result < 0) return {false, "vanished"};
  if (WIFSIGNALED(status)) {
    const int number = WTERMSIG(status);
    return {false, "was killed by signal " + std::to_string(number) + " (" + strsignal(number) + ")"};
  }
  const int code = WEXITSTATUS(status);
  if (code == 127) return {false, "could not be executed"};
  return {code == 0, "exited with status " + std::to_string(code)};
}

}  // namespace gpupool::server
