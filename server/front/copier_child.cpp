#include "server/front/copier_child.h"

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/log.h"
#include "base/process_name.h"

namespace gpupool::server {
namespace {

kj::Exception copierFailure(const std::string& text) {
  return kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__,
                       kj::str("the process that keeps suspended memory (copier) ", text));
}

}  // namespace

CopierChild::CopierChild(kj::UnixEventPort& port, kj::Timer& timer, Settings settings)
    : port_(port), timer_(timer), settings_(std::move(settings)), doors_(settings_.doors), tasks_(*this) {}

std::vector<std::string> CopierChild::arguments() const {
  std::vector<std::string> words{"--copier", "--driver", settings_.driver, "--budget",
                                 std::to_string(settings_.budgetBytes)};
  if (!settings_.folder.empty()) words.insert(words.end(), {"--folder", settings_.folder});
  if (settings_.aheadBytes != 0)
    words.insert(words.end(), {"--touch-ahead", std::to_string(settings_.aheadBytes)});
  if (settings_.verify) words.push_back("--verify");
  return words;
}

void CopierChild::start() {
  auto life = kj::refcounted<Life>();
  life->child = WorkerChild::start(port_, settings_.program, arguments());
  life->stored = {life->child->pid(), processStartTicks(life->child->pid())};
  tellToOutlive(*life->child);
  life_ = kj::mv(life);
  ready_ = awaitReady(kj::addRef(*life_), settings_.startBound).fork();
  changed_();
}

// Without a door, or if it does not hear that, it ends with this process.
void CopierChild::tellToOutlive(WorkerChild& child) {
  if (settings_.away.count() == 0) return;
  const kj::AutoCloseFd door = doors_.make(child.pid());
  if (door.get() < 0) return;
  child.outlive(doors_.nameOf(child.pid()));
  capnp::MallocMessageBuilder message;
  message.initRoot<schema::WorkerOrder>().setOutlive(static_cast<uint32_t>(settings_.away.count()));
  const int descriptor = door;
  child.send(message, std::span(&descriptor, 1));
}

kj::Promise<void> CopierChild::readopt(const StoredCopier& known) {
  return kj::evalNow([&]() -> kj::Promise<void> {
           life_ = adopt(known);
           if (life_.get() == nullptr) return kj::READY_NOW;
           ready_ = awaitReady(kj::addRef(*life_), settings_.adoptBound).fork();
           return ready_.addBranch();
         })
      .then([this] {
        if (life_.get() == nullptr) return;
        GPUPOOL_INFO("copier %d of this server's earlier life goes on", life_->child->pid());
        changed_();
      })
      .catch_([pid = known.pid](kj::Exception&& exception) {
        GPUPOOL_WARNING("copier %d of this server's earlier life is not readopted: %s", pid,
                        exception.getDescription().cStr());
      });
}

// Null: it is gone. Where it cannot be reached it is killed.
kj::Own<CopierChild::Life> CopierChild::adopt(const StoredCopier& known) {
  const int descriptor = static_cast<int>(syscall(SYS_pidfd_open, known.pid, 0));
  if (descriptor < 0) return {};
  kj::AutoCloseFd process(descriptor);
  // Asked after it was opened: the descriptor names this very process.
  if (known.startTicks == 0 || processStartTicks(known.pid) != known.startTicks) return {};
  int again, ends[2];
  KJ_SYSCALL(again = fcntl(process, F_DUPFD_CLOEXEC, 0));
  ownChildren().adopt(known.pid, kj::AutoCloseFd(again));
  KJ_SYSCALL(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends));
  kj::AutoCloseFd ours(ends[0]);
  const kj::AutoCloseFd theirs(ends[1]);
  auto life = kj::refcounted<Life>();
  life->stored = known;
  life->child = kj::heap<WorkerChild>(port_, ownChildren(), WorkerParent::Process{known.pid, kj::mv(process)},
                                      kj::mv(ours));
  life->child->outlive(doors_.nameOf(known.pid));
  if (settings_.away.count() == 0) kj::throwFatalException(copierFailure("is not to outlive its server"));
  capnp::MallocMessageBuilder message;
  auto room = message.initRoot<schema::WorkerOrder>().initAdopt();
  room.setBudgetBytes(settings_.budgetBytes);
  room.setFolder(settings_.folder);
  const auto words = capnp::messageToFlatArray(message);
  const auto bytes = words.asBytes();
  const int error =
      doors_.knock(known.pid, std::as_bytes(std::span(bytes.begin(), bytes.size())), theirs.get());
  if (error != 0)
    kj::throwFatalException(copierFailure(std::string("cannot be reached: ") + strerror(error)));
  return life;
}

std::optional<StoredCopier> CopierChild::stored() const {
  if (life_.get() == nullptr || life_->child->gone()) return std::nullopt;
  return life_->stored;
}

kj::Promise<void> CopierChild::awaitReady(kj::Own<Life> life, kj::Duration bound) {
  auto report = timer_.timeoutAfter(bound, life->child->receive());
  auto kept = kj::addRef(*life);
  return report
      .then(
          [this, life = kj::mv(life)](kj::Maybe<kj::Own<WorkerMessage>> maybe) mutable -> kj::Promise<void> {
            KJ_IF_MAYBE (message, maybe) {
              const auto report = (*message)->get();
              if (report.isFailed())
                return copierFailure("failed to start: " + std::string(report.getFailed().cStr()));
              if (!report.isReady()) return copierFailure("sent something else than that it is ready");
              GPUPOOL_INFO("copier %d is ready", life->child->pid());
              tasks_.add(watch(kj::mv(life)));
              return kj::READY_NOW;
            }
            // Closed its socket; its exit says why.
            auto exit = timer_.timeoutAfter(settings_.startBound, life->child->exited());
            return exit.then([life = kj::mv(life)](WorkerChild::Exit exit) -> kj::Promise<void> {
              return copierFailure("failed to start: it " + exit.text);
            });
          })
      .catch_([this, bound, life = kj::mv(kept)](kj::Exception&& exception) mutable -> kj::Promise<void> {
        drop(*life);
        if (exception.getType() == kj::Exception::Type::OVERLOADED)
          return copierFailure("did not get ready in " + std::to_string(bound / kj::SECONDS) + " s");
        return kj::mv(exception);
      });
}

kj::Promise<void> CopierChild::watch(kj::Own<Life> life) {
  auto exit = life->child->exited();
  return exit.then([this, life = kj::mv(life)](WorkerChild::Exit exit) mutable {
    if (!stopped_)
      GPUPOOL_ERROR("copier %d %s: sessions whose memory it kept end; the next suspension starts another one",
                    life->child->pid(), exit.text.c_str());
    drop(*life);
  });
}

void CopierChild::drop(Life& life) {
  life.child->kill();
  if (life_.get() != &life) return;
  life_ = nullptr;
  changed_();
}

kj::Promise<kj::AutoCloseFd> CopierChild::connect() {
  return kj::evalNow([this]() -> kj::Promise<kj::AutoCloseFd> {
    if (stopped_) return copierFailure("is not started any more: the server is shutting down");
    if (life_.get() == nullptr || life_->child->gone()) start();
    return ready_.addBranch().then([this, life = kj::addRef(*life_)]() mutable { return connectTo(*life); });
  });
}

kj::AutoCloseFd CopierChild::connectTo(Life& life) {
  int ends[2];
  KJ_SYSCALL(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends));
  kj::AutoCloseFd theirs(ends[0]), workers(ends[1]);
  capnp::MallocMessageBuilder message;
  message.initRoot<schema::WorkerOrder>().setServe();
  const int descriptor = theirs;
  if (!life.child->send(message, std::span(&descriptor, 1)))
    kj::throwFatalException(copierFailure(life.child->gone() ? "has just died" : "takes no new session"));
  return workers;
}

void CopierChild::startAhead() {
  if (life_.get() != nullptr) return;
  KJ_IF_MAYBE (exception, kj::runCatchingExceptions([this] { start(); })) {
    GPUPOOL_ERROR("%s", exception->getDescription().cStr());
    return;
  }
  tasks_.add(ready_.addBranch());
}

kj::Promise<void> CopierChild::stop() {
  stopped_ = true;
  if (life_.get() == nullptr) return kj::READY_NOW;
  auto life = kj::addRef(*life_);
  life->child->kill();
  auto exit = life->child->exited();
  return exit.then([life = kj::mv(life)](WorkerChild::Exit) {});
}

void CopierChild::taskFailed(kj::Exception&& exception) {
  GPUPOOL_ERROR("%s", exception.getDescription().cStr());
}

}  // namespace gpupool::server
