// What a worker, perhaps a hostile one, sends a client: its greeting, replies, notices, and the outputs of
// every row into buffers of the application.
//
// Input: u8 what: 0 greeting, 1 replies and notices {u8 channel (bit 1: what the client does in a move goes
// on), u16 length, bytes}, else the outputs of one row: u32 the row's id (another number: a row all the
// same), u8 room of its arrays, bytes.
#include <algorithm>
#include <memory>
#include <vector>

#include "client/session.h"
#include "tests/fuzz/input.h"

namespace gpupool::client {

int sessionDevice(CUdevice device) { return device; }

struct SessionSeam {
  static std::unique_ptr<Session> make() {
    std::unique_ptr<Session> session(new Session);
    // What would be said to nobody: the page is kept for all.
    static auto page = transport::SharedMemory::create(schema::kWordsBytes);
    std::memset(page->data(), 0, schema::kWordsOffset);
    session->words_ = std::make_unique<Words>(page);
    session->hostThread_ = true;  // host functions are queued, none is run
    session->moverRuns_ = true;   // the course of a move is kept; carryOn() is what follows from it
    return session;
  }

  static bool acceptHello(Session& session, std::span<const std::byte> answer) {
    CUresult status{};
    std::string text;
    session.hello_ = std::make_unique<schema::WorkerHello>();
    if (!session.acceptHello(answer, *session.hello_, status, text)) return false;
    // Of a new worker that is like it: it fits.
    if (!session.fits(*session.hello_, *session.hello_, text)) __builtin_trap();
    return true;
  }
  // The mover's next step, as far as it touches nothing but the course.
  static void carryOn(Session& session) {
    using Stage = MoveCourse::Stage;
    MoveCourse& course = session.course_;
    const Stage before = course.stage();
    for (Stage stage : {Stage::stopped, Stage::quiet, Stage::going})
      if (course.reach(stage)) {
        if (static_cast<int>(course.stage()) != static_cast<int>(before) + 1) __builtin_trap();
        return;
      }
    if (course.stage() == Stage::going) return course.arrive();
    if (course.stage() == Stage::ending && !course.end() && course.stage() != Stage::none) __builtin_trap();
  }
  static void deliver(Session& session, std::span<const std::byte> message) { session.deliver(message); }
  static void notice(Session& session, std::span<const std::byte> message) { session.handleNotice(message); }
  static void wait(Session& session, Session::Waiter& waiter) { session.addWaiter(&waiter); }
};

}  // namespace gpupool::client

namespace gpupool::fuzz {
namespace {

using client::RowCodec;

// Buffers of one call, each of its own: what is written beyond one is seen.
class Room {
 public:
  explicit Room(size_t count) : count_(count) {}
  size_t count() const { return count_; }
  template <class T>
  T* make(size_t elements) {
    auto bytes = std::make_unique<std::byte[]>(std::max<size_t>(elements * sizeof(T), 1));
    std::memset(bytes.get(), 0, elements * sizeof(T));
    kept_.push_back(std::move(bytes));
    return reinterpret_cast<T*>(kept_.back().get());
  }

 private:
  size_t count_;
  std::vector<std::unique_ptr<std::byte[]>> kept_;
};

template <class Role, class T>
T argument(Room& room) {
  using P = std::remove_const_t<std::remove_pointer_t<T>>;
  if constexpr (schema::isRole<schema::OutHandle, Role> || schema::isRole<schema::Out, Role> ||
                schema::isRole<schema::DeviceValue, Role>) {
    return room.make<P>(1);
  } else if constexpr (schema::isRole<schema::InOut, Role>) {
    P* value = room.make<P>(1);
    if constexpr (std::is_integral_v<P>) *value = static_cast<P>(room.count());
    return value;
  } else if constexpr (schema::isArrayRole<schema::OutArray, Role> ||
                       schema::isArrayRole<schema::OutText, Role>) {
    return room.make<P>(room.count());
  } else if constexpr (schema::isRole<schema::In, Role> && std::is_integral_v<T>) {
    return static_cast<T>(room.count());
  } else {
    return T{};
  }
}

// As callers do: as many elements as the count now says, text up to its end.
template <class R, class Role, class T, class Tuple>
void use(const T& value, const Tuple& arguments) {
  if constexpr (schema::isArrayRole<schema::OutArray, Role>) {
    constexpr size_t index = schema::parameterIndex<R, Role::count>();
    if constexpr (std::is_pointer_v<std::tuple_element_t<index, Tuple>>)
      touch(value, static_cast<size_t>(*std::get<index>(arguments)) * sizeof *value);
  } else if constexpr (schema::isArrayRole<schema::OutText, Role>) {
    constexpr size_t index = schema::parameterIndex<R, Role::count>();
    if (std::get<index>(arguments) != 0) touch(value, std::strlen(value));
  }
}

template <class R>
void outputs(std::span<const std::byte> bytes, size_t count) {
  Room room(count);
  [&]<size_t... I>(std::index_sequence<I...>) {
    typename R::Arguments arguments{argument<std::tuple_element_t<I, typename R::RoleList>,
                                             std::tuple_element_t<I, typename R::Arguments>>(room)...};
    schema::Reader in(bytes);
    RowCodec<R>::decode(in, arguments);
    (use<R, std::tuple_element_t<I, typename R::RoleList>>(std::get<I>(arguments), arguments), ...);
  }(std::make_index_sequence<R::arity>{});
}

using Outputs = void (*)(std::span<const std::byte>, size_t);

// Of all rows that are sent at all, in ascending order of id.
const std::vector<std::pair<uint32_t, Outputs>>& rows() {
  static const auto* all = [] {
    auto* list = new std::vector<std::pair<uint32_t, Outputs>>;
    auto add = [&]<class R>(R*) {
      if constexpr (R::travels) list->emplace_back(R::id, &outputs<R>);
    };
#define CALL(function, ...) add(static_cast<schema::RowOf<#function>*>(nullptr));
#define SESSION_CALL(function, ...) add(static_cast<schema::RowOf<#function>*>(nullptr));
#include "schema/calls/all.h"
#undef CALL
#undef SESSION_CALL
    std::sort(list->begin(), list->end());
    return list;
  }();
  return *all;
}

void oneRow(Input& input) {
  const auto id = input.value<uint32_t>();
  auto found = std::lower_bound(rows().begin(), rows().end(), std::pair<uint32_t, Outputs>{id, nullptr});
  const auto& row = found != rows().end() && found->first == id ? *found : rows()[id % rows().size()];
  const size_t count = input.value<uint8_t>() % 33;
  row.second(input.all(), count);
}

void greeting(Input& input) {
  auto session = client::SessionSeam::make();
  auto rest = input.all();
  // Mutation keeps to short inputs: behind theirs comes what follows a greeting's beginning, zeros.
  std::vector<std::byte> message(rest.begin(), rest.end());
  if (message.size() > 64) message.resize(sizeof(schema::WorkerHello));
  if (!client::SessionSeam::acceptHello(*session, message)) return;
  const auto& hello = session->hello();
  touch(&schema::kSpaces[hello.space], sizeof hello.space);
  for (uint32_t d = 0; d < hello.deviceCount; ++d) {
    auto ends = [](const auto& text) { return std::memchr(text, 0, sizeof text) != nullptr; };
    // Texts are texts, for whoever copies them.
    if (!ends(hello.devices[d].name) || !ends(hello.devices[d].pciBusId)) __builtin_trap();
  }
}

void messages(Input& input) {
  auto session = client::SessionSeam::make();
  client::Session::Waiter waiters[3];
  for (uint64_t i = 0; i < 3; ++i) {
    waiters[i].seq = i + 1;
    client::SessionSeam::wait(*session, waiters[i]);
  }
  while (!input.empty()) {
    const auto channel = input.value<uint8_t>();
    const bool control = (channel & 1) != 0;
    if ((channel & 2) != 0) client::SessionSeam::carryOn(*session);
    auto bytes = input.blob();
    std::vector<std::byte> message(bytes.begin(), bytes.end());
    if (control)
      client::SessionSeam::notice(*session, message);
    else
      client::SessionSeam::deliver(*session, message);
  }
  for (const auto& waiter : waiters) touch(waiter.bytes.data(), waiter.bytes.size());
}

}  // namespace
}  // namespace gpupool::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace gpupool::fuzz;
  Input input(data, size);
  switch (input.value<uint8_t>()) {
    case 0:
      greeting(input);
      break;
    case 1:
      messages(input);
      break;
    default:
      oneRow(input);
  }
  return 0;
}
