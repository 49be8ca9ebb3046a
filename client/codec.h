#pragma once
// The client's half of a row: arguments into frame bytes, reply bytes into the caller's outputs. What a role
// means on the wire is here and, mirrored, in server/worker/codec.h.

#include <algorithm>
#include <cstring>

#include "client/devices.h"
#include "client/objects.h"
#include "schema/rows.h"
#include "schema/structs.h"
#include "schema/wire.h"

namespace gpupool::client {

using schema::padded;
using schema::Reader;
using schema::Writer;

// One parameter of row R at position I, of type T with role Role.
template <class R, class Role, class T>
struct ClientCodec {
  using P = std::remove_pointer_t<T>;
  template <template <schema::Name> class X>
  static constexpr bool is = schema::isRole<X, Role>;
  static constexpr bool isArray = schema::isArrayRole<schema::Array, Role>;
  static constexpr bool isOutArray = schema::isArrayRole<schema::OutArray, Role>;
  static constexpr bool isOutText = schema::isArrayRole<schema::OutText, Role>;

  template <class Tuple>
  static size_t countOf(const Tuple& arguments) {
    constexpr size_t index = schema::parameterIndex<R, Role::count>();
    if constexpr (std::is_pointer_v<std::tuple_element_t<index, Tuple>>)
      return std::get<index>(arguments) == nullptr ? 0 : static_cast<size_t>(*std::get<index>(arguments));
    else
      return static_cast<size_t>(std::get<index>(arguments));
  }

  template <class Tuple>
  static size_t measure(const T& value, const Tuple& arguments) {
    if constexpr (is<schema::Struct>)
      return 8 + (value ? padded(sizeof(P)) : 0);
    else if constexpr (is<schema::InOut>)
      return 8 + (value ? padded(sizeof(P)) : 0);
    else if constexpr (is<schema::Text>)
      return 8 + (value ? padded(std::strlen(value)) : 0);
    else if constexpr (isArray)
      return 8 + (value ? padded(sizeof(P) * countOf(arguments)) : 0);
    else if constexpr (isOutArray || isOutText)
      return 8;
    else if constexpr (is<schema::Unused>)
      return 0;
    else
      return padded(sizeof(T) > 8 ? sizeof(T) : 8);
  }

  template <class Tuple>
  static void encode(Writer& out, const T& value, const Tuple& arguments) {
    if constexpr (is<schema::In>) {
      uint64_t small = 0;
      if constexpr (sizeof(T) <= 8) {
        std::memcpy(&small, &value, sizeof value);
        out.value(small);
      } else {
        out.value(value);
      }
    } else if constexpr (is<schema::HostAddress>) {
      out.value<uint64_t>(reinterpret_cast<uint64_t>(value));
    } else if constexpr (is<schema::Device>) {
      out.value<uint64_t>(static_cast<uint32_t>(sessionDevice(value)));
    } else if constexpr (is<schema::Handle> || is<schema::Frees>) {
      out.value<uint64_t>(schema::rawHandle(value));
    } else if constexpr (is<schema::Mints>) {
      out.value<uint64_t>(value == nullptr ? 0 : schema::rawHandle(*value));  // minted before: see mint()
    } else if constexpr (is<schema::OutHandle> || is<schema::Out> || is<schema::DeviceValue>) {
      out.value<uint64_t>(value != nullptr);
    } else if constexpr (is<schema::Struct> || is<schema::InOut>) {
      out.value<uint64_t>(value != nullptr);
      if (value != nullptr) out.raw(value, sizeof(P));
    } else if constexpr (is<schema::Text>) {
      out.text(value == nullptr ? std::string_view() : std::string_view(value));
    } else if constexpr (isArray) {
      size_t bytes = value == nullptr ? 0 : sizeof(P) * countOf(arguments);
      out.blob(value, bytes);
    } else if constexpr (isOutArray || isOutText) {
      out.value<uint64_t>(value != nullptr);
    } else {
      static_assert(is<schema::Unused>);
    }
  }

  // Whether this parameter is the room of an output array that is there.
  template <class Tuple>
  static bool countsArray(const Tuple& arguments) {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return (countsThat<std::tuple_element_t<I, typename R::RoleList>>(std::get<I>(arguments)) || ... ||
              false);
    }(std::make_index_sequence<R::arity>{});
  }
  template <class Other, class V>
  static bool countsThat(const V& array) {
    if constexpr (schema::isArrayRole<schema::OutArray, Other>)
      return Other::count.view() == Role::name.view() && array != nullptr;
    else
      return false;
  }

  template <class Tuple>
  static void decode(Reader& in, const T& value, const Tuple& arguments) {
    if constexpr (is<schema::OutHandle>) {
      uint64_t id = in.value<uint64_t>();
      if (value != nullptr) *value = schema::asHandle<P>(id);
    } else if constexpr (is<schema::Out> || is<schema::DeviceValue>) {
      P answer = in.value<P>();
      if (value != nullptr) *value = answer;
    } else if constexpr (is<schema::InOut>) {
      P answer = in.value<P>();
      // What counts the elements of an array is never more than its room: callers go by it.
      if constexpr (std::is_integral_v<P>)
        if (value != nullptr && countsArray(arguments)) answer = std::min(answer, *value);
      if (value != nullptr) *value = answer;
    } else if constexpr (isOutArray) {
      auto bytes = in.blob();
      size_t room = countOf(arguments) * sizeof(P);  // the InOut count was decoded after: still the capacity
      if (value != nullptr && !bytes.empty()) std::memcpy(value, bytes.data(), std::min(bytes.size(), room));
    } else if constexpr (isOutText) {
      auto text = in.text();
      size_t room = countOf(arguments);
      if (value != nullptr && room != 0) {
        size_t n = std::min(text.size(), room - 1);
        std::copy_n(text.data(), n, value);  // also of no text at all
        value[n] = 0;
      }
    }
  }
};

template <class R>
struct RowCodec;
template <class R>
  requires schema::isRow<R>
struct RowCodec<R> {
  using Arguments = typename R::Arguments;
  template <size_t I>
  using Codec =
      ClientCodec<R, std::tuple_element_t<I, typename R::RoleList>, std::tuple_element_t<I, Arguments>>;

  static size_t measure(const Arguments& arguments) {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return (size_t{0} + ... + Codec<I>::measure(std::get<I>(arguments), arguments));
    }(std::make_index_sequence<R::arity>{});
  }
  static void encode(Writer& out, const Arguments& arguments) {
    [&]<size_t... I>(std::index_sequence<I...>) {
      (Codec<I>::encode(out, std::get<I>(arguments), arguments), ...);
    }(std::make_index_sequence<R::arity>{});
  }
  static void decode(Reader& in, const Arguments& arguments) {
    [&]<size_t... I>(std::index_sequence<I...>) {
      (Codec<I>::decode(in, std::get<I>(arguments), arguments), ...);
    }(std::make_index_sequence<R::arity>{});
  }
};

}  // namespace gpupool::client
