// WorkerProcess's part in what the server orders: the one session, and what is to become of it.
#include <capnp/message.h>
#include <capnp/serialize.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <utility>

#include "base/descriptor_passing.h"
#include "schema/convert.h"
#include "schema/worker.capnp.h"
#include "server/worker_process.h"

namespace gpupool::server {
namespace {

const char kNonsenseText[] = "the GPU server sent nonsense";

// The server's event loop used it without blocking; transports here block and poll.
void makeBlocking(int socket) { fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) & ~O_NONBLOCK); }

// One datagram and the descriptors that came with it. bytes: 0 at end-of-file, negative on error.
struct Datagram {
  kj::Array<capnp::word> words = kj::heapArray<capnp::word>(kMaxDatagram / sizeof(capnp::word));
  ssize_t bytes = 0;
  std::vector<int> descriptors;

  void closeDescriptors() const {
    for (int descriptor : descriptors) close(descriptor);
  }
};

Datagram receive(int socket) {
  Datagram datagram;
  auto received = receiveWithDescriptors(
      socket, std::as_writable_bytes(std::span(datagram.words.begin(), datagram.words.size())));
  datagram.bytes = received.whole ? received.bytes : -1;
  datagram.descriptors = std::move(received.descriptors);
  return datagram;
}

SessionStart parseStart(schema::WorkerStart::Reader start, const std::vector<int>& descriptors) {
  SessionStart session;
  const auto kinds = start.getDescriptors();
  if (kinds.size() != descriptors.size()) throw std::runtime_error("other descriptors came than it names");
  for (size_t i = 0; i < descriptors.size(); ++i) {
    const auto kind = kinds[static_cast<unsigned>(i)];
    if (kind == schema::Descriptor::CLIENT_SOCKET) session.socket = descriptors[i];
    if (kind == schema::Descriptor::MODULE_CACHE) session.moduleCache = descriptors[i];
    if (kind == schema::Descriptor::DEVICE_LOCK) session.deviceLocks.push_back(descriptors[i]);
    if (kind == schema::Descriptor::STATE) session.state = descriptors[i];
    if (kind == schema::Descriptor::DOOR) session.door = descriptors[i];
  }
  session.rebuild = start.getRebuild();
  session.stream = start.getStream();
  session.files = session.stream && start.getFiles();
  session.isProtected = start.getProtected();
  session.holderKeeps = start.getHolderKeeps();
  if (session.stream && !session.rebuild) throw std::runtime_error("a stream, and nothing to rebuild");
  if ((session.socket < 0) != session.rebuild)
    throw std::runtime_error(session.rebuild ? "a client's socket came with it" : "no socket came with it");
  if ((session.state >= 0) != session.rebuild)
    throw std::runtime_error(session.rebuild ? "no state socket came with it"
                                             : "a state socket came with it");
  session.session = schema::read(start.getSession());
  session.epoch = start.getEpoch();
  session.transport = start.getTransport();
  for (auto device : start.getDevices()) session.devices.push_back(schema::read(device));
  session.networkDevice = start.getNetworkDevice();
  session.networkWire = start.getNetworkWire();
  session.moduleCacheBytes = start.getModuleCacheBytes();
  session.clientPid = start.getClientPid();
  session.reportActivity = start.getReportActivity();
  session.away = std::chrono::milliseconds(start.getAwayMs());
  return session;
}

ShareAnswer readShare(schema::ShareAnswer::Reader from) {
  static_assert(static_cast<int>(schema::ShareError::TOO_MANY) ==
                static_cast<int>(ShareAnswer::Error::tooMany));
  ShareAnswer answer;
  if (from.getError() <= schema::ShareError::TOO_MANY)
    answer.error = static_cast<ShareAnswer::Error>(from.getError());
  if (answer.error == ShareAnswer::Error::elsewhere && from.getOtherDevice())
    answer.error = ShareAnswer::Error::otherDevice;
  answer.key = {schema::read(from.getKey().getServer()), schema::read(from.getKey().getKey())};
  answer.opening = from.getOpening();
  const auto part = from.getOffer();
  answer.offer = {0, part.getPlace(), part.getBytes(), part.getOffset(), part.getLength()};
  answer.session = from.getSession();
  const auto receipt = std::as_bytes(std::span(from.getReceipt().begin(), from.getReceipt().size()));
  answer.receipt.assign(receipt.begin(), receipt.end());
  return answer;
}

}  // namespace

std::optional<SessionStart> WorkerProcess::waitForSession() {
  const Datagram datagram = receive(control()->socket);
  if (datagram.bytes == 0 || (datagram.bytes < 0 && errno == ECONNRESET)) return std::nullopt;
  try {
    if (datagram.bytes < 0 || datagram.bytes % sizeof(capnp::word) != 0)
      throw std::runtime_error("truncated");
    capnp::FlatArrayMessageReader reader(datagram.words.slice(0, datagram.bytes / sizeof(capnp::word)));
    const auto order = reader.getRoot<schema::WorkerOrder>();
    if (order.isStop()) {
      datagram.closeDescriptors();
      return std::nullopt;
    }
    if (!order.isStart()) throw std::runtime_error("it is none");
    if (order.getStart().getDevices().size() == 0) throw std::runtime_error("no devices");
    auto session = parseStart(order.getStart(), datagram.descriptors);
    makeBlocking(session.rebuild ? session.state : session.socket);
    session_ = session.session;
    epoch_ = session.epoch;
    devices_ = session.devices.size();
    deviceLocks_ = session.deviceLocks;
    door_ = session.away.count() > 0 ? session.door : -1;
    awayBound_ = session.away;
    if (door_ >= 0 && session.socket >= 0) clientKept_ = fcntl(session.socket, F_DUPFD_CLOEXEC, 0);
    return session;
  } catch (const kj::Exception& error) {
    datagram.closeDescriptors();
    throw std::runtime_error(std::string("malformed start: ") + error.getDescription().cStr());
  } catch (const std::exception& error) {
    datagram.closeDescriptors();
    throw std::runtime_error(std::string("malformed start: ") + error.what());
  }
}

std::optional<int> WorkerProcess::waitForClient(std::chrono::milliseconds bound) {
  std::unique_lock lock(memoryMutex_);
  answered_.wait_for(lock, bound, [&] { return client_ >= 0 || stopping(); });
  if (client_ < 0 || stopping()) return std::nullopt;
  return std::exchange(client_, -1);
}

// Takes the descriptor. Of a worker that has had one, it is nobody's.
void WorkerProcess::takeClient(std::string transport, std::vector<int>& descriptors) {
  std::lock_guard lock(memoryMutex_);
  if (descriptors.size() != 1 || std::exchange(clientCame_, true)) return;
  clientTransport_ = std::move(transport);
  client_ = descriptors[0];
  if (door_ >= 0) clientKept_ = fcntl(client_, F_DUPFD_CLOEXEC, 0);
  descriptors.clear();
  makeBlocking(client_);
  answered_.notify_all();
}

// Takes the descriptors that it can use.
void WorkerProcess::suspend(uint32_t drainMs, std::vector<int>& descriptors) {
  if (descriptors.size() == 1 && orders_.suspend) {
    beginChange();
    orders_.suspend(std::chrono::milliseconds(drainMs), descriptors[0]);
    descriptors.clear();
    return;
  }
  SuspendOutcome refused;
  refused.error = orders_.suspend ? "the order came without a connection to the copier"
                                  : "this worker cannot suspend its session";
  reportSuspended(refused);
}

void WorkerProcess::beginChange() {
  std::lock_guard lock(saidMutex_);
  ++changes_;
}

struct WorkerProcess::Order {
  schema::WorkerOrder::Reader reader;
  std::vector<int>& descriptors;
};

// Takes the descriptors that it can use.
void WorkerProcess::move(const Order& given) {
  const auto order = given.reader.getMove();
  auto& descriptors = given.descriptors;
  const bool stream = order.getStream(), copy = order.getCopy(), hold = order.getHold() && !copy;
  const auto& copies = order.getPages() ? orders_.copyPages : orders_.copy;
  const bool able = copy ? copies != nullptr : hold ? orders_.hold != nullptr : orders_.move != nullptr;
  if (descriptors.size() == (stream ? 1u : 2u) && able && (stream || (!copy && !hold))) {
    const std::chrono::milliseconds drain(order.getDrainMs());
    makeBlocking(descriptors.back());
    if (copy)
      copies(drain, descriptors.back());
    else if (hold)
      orders_.hold(drain, order.getEpoch(), descriptors.back());
    else
      orders_.move(drain, order.getEpoch(), stream ? -1 : descriptors[0], descriptors.back(),
                   order.getDirect());
    descriptors.clear();
    return;
  }
  MoveOutcome refused;
  refused.error = !able    ? std::string("this worker cannot ") + (copy ? "copy" : "move") + " its session"
                  : stream ? "the order came without its connection"
                           : "the order came without its two connections";
  reportMoved(refused);
}

// Takes the descriptors that it can use; why the session ends, or empty.
std::string WorkerProcess::carryOut(const Order& given) {
  const auto& [order, descriptors] = given;
  switch (order.which()) {
    case schema::WorkerOrder::STOP:
      return order.getStop().size() != 0 ? order.getStop().cStr() : "stopped";
    case schema::WorkerOrder::MEMORY: {
      const auto memory = order.getMemory();
      answer(memory.getTicket(),
             {memory.getGranted(), true, memory.getOthersBytes(), memory.getError().cStr()});
      return "";
    }
    case schema::WorkerOrder::SUSPEND:
      suspend(order.getSuspend().getDrainMs(), descriptors);
      return "";
    case schema::WorkerOrder::RESUME:
      if (!orders_.resume) return "";
      beginChange();
      orders_.resume();
      return "";
    case schema::WorkerOrder::MOVE:
      move(given);
      return "";
    case schema::WorkerOrder::KEPT:
      if (orders_.kept) orders_.kept(order.getKept().getFrame(), order.getKept().getAside());
      return "";
    case schema::WorkerOrder::GONE:
      if (orders_.gone) orders_.gone(order.getGone());
      return "";
    case schema::WorkerOrder::SHARE: {
      ShareAnswer answer = readShare(order.getShare());
      if (!descriptors.empty()) {
        answer.descriptor = descriptors.back();
        descriptors.pop_back();
      }
      hearShare(order.getShare().getTicket(), answer);
      return "";
    }
    case schema::WorkerOrder::CLIENT:
      takeClient(order.getClientTransport().cStr(), descriptors);
      return "";
    default:
      return kNonsenseText;
  }
}

std::string WorkerProcess::obey() {
  Datagram datagram = receive(control()->socket);
  // It has died with reports unread. What it ordered before comes next, and then the end.
  if (datagram.bytes < 0 && errno == ECONNRESET) return "";
  std::string why = datagram.bytes <= 0 ? kServerDiedText : kNonsenseText;
  if (datagram.bytes > 0) {
    try {
      capnp::FlatArrayMessageReader reader(datagram.words.slice(0, datagram.bytes / sizeof(capnp::word)));
      why = carryOut({reader.getRoot<schema::WorkerOrder>(), datagram.descriptors});
    } catch (const kj::Exception&) {
      why = kNonsenseText;
    }
  }
  datagram.closeDescriptors();
  return why;
}

}  // namespace gpupool::server
