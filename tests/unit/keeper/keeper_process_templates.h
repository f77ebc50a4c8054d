#pragma once

#include <cstring>
#include <stdexcept>

namespace bulkhead::test {

template <typename T>
T Heard::as() const {
    if (body.size() < sizeof(T)) throw std::runtime_error{"a packet with too short a body"};
    T value;
    std::memcpy(&value, body.data(), sizeof value);
    return value;
}

template <typename T>
T Seat::hear(keeper_link::Type type) {
    const Heard heard = hear();
    if (!heard.is(type)) throw std::runtime_error{"a packet of type " + std::to_string(heard.header.type)};
    return heard.as<T>();
}

template <typename T>
void Seat::say(keeper_link::Type type, const T& body, std::string_view tail) {
    std::string bytes{reinterpret_cast<const char*>(&body), sizeof body};
    bytes += tail;
    say(type, std::string_view{bytes});
}

}  // namespace bulkhead::test
