#pragma once
// A client of raw frames: runs a worker's session on a thread of this process and says to it whatever a test
// likes, also what no client of ours would.

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/content.h"
#include "schema/frame.h"
#include "schema/handle_ids.h"
#include "schema/hello.h"
#include "schema/rows.h"
#include "schema/wire.h"
#include "server/worker/session.h"
#include "transports/implementations.h"

#include "catch.h"

namespace gpupool::server::test {

using handles::makeHandle;
using schema::Frame;
using schema::Notice;
using schema::NoticeType;
using transport::Channel;

inline constexpr uint64_t kEpoch = 3;
inline constexpr uint64_t kMiB = uint64_t{1} << 20;
inline constexpr uint64_t kLimit = 64 * kMiB;  // the lease's, of the one device
inline constexpr uint64_t kContext = makeHandle(handles::Kind::context, 1, 1);
inline constexpr uint64_t kStream = makeHandle(handles::Kind::stream, 1, 1);

inline const Driver& softDriver() {
  static const Driver* driver = [] {
    auto loaded = Driver::load(SOFT_DRIVER);
    if (loaded->cuInit(0) != CUDA_SUCCESS) abort();
    return loaded.release();
  }();
  return *driver;
}

inline transport::Deadline within(int milliseconds = 5000) {
  return transport::Clock::now() + std::chrono::milliseconds(milliseconds);
}

template <class Condition>
bool eventually(Condition condition) {
  for (auto end = within(); !condition();) {
    if (transport::Clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// A session takes stdout and stderr for device output; the test's report needs them back.
class KeptOutput {
 public:
  ~KeptOutput() {
    for (int i = 0; i < 2; ++i) {
      dup2(saved_[i], i + 1);
      close(saved_[i]);
    }
  }

 private:
  int saved_[2] = {dup(STDOUT_FILENO), dup(STDERR_FILENO)};
};

inline SessionStart sessionStart(int moduleCache = -1) {
  SessionStart start;
  start.epoch = kEpoch;
  start.devices.resize(1);
  start.devices[0].memoryBytes = kLimit;
  start.moduleCache = moduleCache;
  start.moduleCacheBytes = 64 * kMiB;
  return start;
}

// Less staging memory than a worker has: clearing 64 MiB for each session took most of the tests' time.
inline HostPages hostPages() {
  return {transport::SharedMemory::create(4 * kMiB), transport::SharedMemory::create(schema::kWordsBytes),
          nullptr};
}

// Arguments of a frame, by hand.
class Arguments {
 public:
  Arguments& value(uint64_t v) { return buffer_.value(v), *this; }
  template <class T>
  Arguments& structure(const T& v) {
    return buffer_.raw(&v, sizeof v), *this;
  }
  Arguments& blob(const void* data, size_t bytes) { return buffer_.blob(data, bytes), *this; }
  std::span<const std::byte> span() const { return buffer_.span(); }

 private:
  schema::ByteBuffer buffer_;
};

struct Answer {
  schema::Reply header;
  std::vector<std::byte> outputs;
  CUresult status() const { return static_cast<CUresult>(header.status); }
};

struct Failure {
  schema::FailedBody body;
  std::string text;
};

class Client {
 public:
  using Wire = std::unique_ptr<transport::Connection>;
  // moduleCache: the worker's. wrap: of the worker's end.
  explicit Client(const Driver& driver = softDriver(), std::unique_ptr<Account> account = nullptr,
                  int moduleCache = -1, Wire (*wrap)(Wire) = nullptr)
      : Client(sessionStart(moduleCache), driver, std::move(account), wrap) {}
  explicit Client(const SessionStart& start, const Driver& driver = softDriver(),
                  std::unique_ptr<Account> account = nullptr, Wire (*wrap)(Wire) = nullptr) {
    auto [mine, theirs] = transport::loopbackPair({});
    wire = std::move(mine);
    if (wrap != nullptr) theirs = wrap(std::move(theirs));
    KeptOutput kept;
    session = std::make_unique<Session>(driver, start, std::move(theirs), hostPages(), std::move(account));
    output_ = dup(STDOUT_FILENO);
    thread_ = std::thread([this] { reason_ = session->run(), ended_ = true; });
  }
  ~Client() {
    wire->close();
    thread_.join();
    close(output_);
    wire.reset();  // its end knows the session's memory, too
    // In a worker the thread that ran the session takes it apart: one with a context, without which no memory
    // is unregistered.
    session->objects().forEach(handles::Kind::context, [](uint64_t, uint64_t real) {
      softDriver().cuCtxSetCurrent(reinterpret_cast<CUcontext>(real));
    });
  }

  // ---- greeting
  static schema::ClientHello goodHello() {
    schema::ClientHello hello;
    hello.protocol = schema::kProtocolVersion;
    hello.rowsHash = schema::rowsHash();
    hello.epoch = kEpoch;
    hello.spaces = 0xf;
    return hello;
  }
  void sayHello(const schema::ClientHello& mine) {
    send(Channel::call, &mine, sizeof mine);
    auto message = wire->receive(Channel::call, within());
    REQUIRE(message.size() == sizeof hello);
    std::memcpy(&hello, message.data(), sizeof hello);
  }
  Client& greet() {
    sayHello(goodHello());
    REQUIRE(hello.status == CUDA_SUCCESS);
    REQUIRE(hello.deviceCount == 1);
    words = wire->map({hello.words.id, hello.words.generation}, nullptr, within());
    REQUIRE(words);
    return *this;
  }
  // Greets, and has a context that is current for every later frame.
  Client& open() {
    greet();
    REQUIRE(
        await(schema::RowOf<"cuDevicePrimaryCtxRetain">::id, Arguments().value(kContext).value(0)).status() ==
        CUDA_SUCCESS);
    context = kContext;
    return *this;
  }

  // ---- frames
  void send(Channel channel, const void* data, size_t bytes) {
    std::byte* out = wire->reserve(channel, bytes, within());
    REQUIRE(out != nullptr);
    std::memcpy(out, data, bytes);
    wire->commit(channel, bytes);
  }
  static Frame header(uint32_t call, uint32_t flags, uint64_t seq) {
    Frame f;
    f.call = call;
    f.flags = flags;
    f.seq = seq;
    f.epoch = kEpoch;
    return f;
  }
  Frame frame(uint32_t call, uint32_t flags) {
    Frame f = header(call, flags, ++seq);
    f.context = context;
    return f;
  }
  void send(const Frame& f, std::span<const std::byte> arguments) {
    std::vector<std::byte> bytes(sizeof f + arguments.size());
    std::memcpy(bytes.data(), &f, sizeof f);
    if (!arguments.empty()) std::memcpy(bytes.data() + sizeof f, arguments.data(), arguments.size());
    send(Channel::call, bytes.data(), bytes.size());
  }
  uint64_t post(uint32_t call, const Arguments& arguments, uint32_t flags = 0) {
    send(frame(call, flags), arguments.span());
    return seq;
  }
  Answer await(uint32_t call, const Arguments& arguments) {
    uint64_t mine = post(call, arguments, Frame::kAwait);
    auto answer = receive();
    REQUIRE(answer);
    REQUIRE(answer->header.seq == mine);
    return *answer;
  }
  // Sends the image; the arguments of sessionModuleLoad.
  Arguments loading(uint64_t module, std::span<const char> code) {
    const auto bytes = std::as_bytes(code);
    const Digest digest = contentDigest(bytes);
    schema::ImageName name;
    std::memcpy(name.words, digest.data(), sizeof name.words);
    name.bytes = bytes.size();
    await(schema::RowOf<"sessionImageOffer">::id, Arguments().structure(name).value(1));
    post(schema::RowOf<"sessionImageData">::id,
         Arguments().structure(name).value(0).blob(bytes.data(), bytes.size()).value(bytes.size()));
    Arguments arguments;
    arguments.value(module).structure(name).value(0).blob(nullptr, 0).blob(nullptr, 0);
    for (const uint64_t wanted : {0, 0, 0, 0, 0, 1}) arguments.value(wanted);
    return arguments;
  }
  // Aside calls: frames on the control channel, with a sequence of their own.
  void sendAside(const Frame& f, std::span<const std::byte> arguments) {
    schema::ByteBuffer out;
    out.value(Notice{NoticeType::aside, static_cast<uint32_t>(kEpoch), 0});
    out.raw(&f, sizeof f);
    out.raw(arguments.data(), arguments.size());
    send(Channel::control, out.span().data(), out.size());
  }
  uint64_t aside(uint32_t call, const Arguments& arguments, uint32_t flags = 0) {
    const Frame f = header(call, flags, schema::kAside | ++asides);
    sendAside(f, arguments.span());
    return f.seq;
  }
  Answer awaitAside(uint32_t call, const Arguments& arguments) {
    uint64_t mine = aside(call, arguments, Frame::kAwait);
    auto answer = receive();
    REQUIRE(answer);
    REQUIRE(answer->header.seq == mine);
    return *answer;
  }
  std::optional<Answer> receive(int milliseconds = 5000) {
    auto message = wire->receive(Channel::call, within(milliseconds));
    if (message.size() < sizeof(schema::Reply)) return {};
    Answer answer;
    std::memcpy(&answer.header, message.data(), sizeof answer.header);
    answer.outputs.assign(message.begin() + sizeof answer.header, message.end());
    return answer;
  }

  // ---- control
  template <class Body>
  void tell(NoticeType type, const Body& body) {
    schema::ByteBuffer out;
    out.value(Notice{type, static_cast<uint32_t>(kEpoch), 0});
    out.value(body);
    send(Channel::control, out.span().data(), out.size());
  }
  // The next notice's bytes behind the header, if it is of that type.
  std::optional<std::vector<std::byte>> notice(NoticeType type) {
    auto message = wire->receive(Channel::control, within());
    if (message.size() < sizeof(Notice)) return {};
    Notice header;
    std::memcpy(&header, message.data(), sizeof header);
    if (header.type != type || header.epoch != kEpoch) return {};
    return std::vector<std::byte>(message.begin() + sizeof header, message.end());
  }
  std::optional<Failure> failure() {
    auto bytes = notice(NoticeType::failed);
    if (!bytes) return {};
    schema::Reader in(*bytes);
    Failure failure;
    failure.body = in.value<schema::FailedBody>();
    failure.text = std::string(in.text());
    if (in.bad()) return {};
    return failure;
  }

  // The session is over, the client was told why, and nothing was answered. What it was told.
  std::string endedWith() {
    auto told = failure();
    REQUIRE(told);
    CHECK(told->body.status != CUDA_SUCCESS);
    CHECK(eventually([&] { return ended(); }));
    CHECK_FALSE(wire->pending(Channel::call));
    CHECK(sticky() == CUDA_ERROR_UNKNOWN);
    return told->text;
  }
  bool ended() const { return ended_; }
  // Why run() returned; after ended().
  const std::string& reason() const { return reason_; }

  // Where the session has kernels print.
  int output() const { return output_; }

  uint32_t sticky() { return std::atomic_ref<uint32_t>(header().sticky).load(); }
  uint32_t bell() { return std::atomic_ref<uint32_t>(header().bell).load(); }
  uint64_t word(uint64_t index) {
    auto* first = reinterpret_cast<uint64_t*>(words->data() + schema::kWordsOffset);
    return std::atomic_ref<uint64_t>(first[index]).load();
  }
  const schema::AddressSpace& space() const { return schema::kSpaces[hello.space]; }

  std::unique_ptr<transport::Connection> wire;
  std::unique_ptr<Session> session;
  schema::WorkerHello hello;
  std::shared_ptr<transport::SharedMemory> words;
  uint64_t seq = 0;
  uint64_t asides = 0;
  uint64_t context = 0;

 private:
  schema::WordsHeader& header() { return *reinterpret_cast<schema::WordsHeader*>(words->data()); }
  int output_ = -1;
  std::string reason_;
  std::atomic<bool> ended_{false};
  std::thread thread_;
};

inline bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

// A host function of the program is next on the stream kStream, and has begun: the device waits for it.
inline void beginHostFunction(Client& client) {
  client.post(schema::RowOf<"sessionHostFunction">::id, Arguments().value(kStream).value(42).value(0));
  REQUIRE(client.notice(NoticeType::callback));
}
inline void endHostFunction(Client& client) {
  client.tell(NoticeType::callbackDone, schema::CallbackBody{42, 0, 0});
}

}  // namespace gpupool::server::test
