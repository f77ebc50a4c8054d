#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string_view>

#include <fmt/format.h>

namespace bulkhead::fuzz {

/// The bytes of one run, taken from the front. What is beyond their end reads as zeros
/// and empty pieces.
class Input {
public:
    Input(const std::uint8_t* data, std::size_t size) : rest_{data, size} {}

    [[nodiscard]] bool empty() const noexcept { return rest_.empty(); }

    template <typename T>
    [[nodiscard]] T take() noexcept {
        T value{};
        const std::size_t count = std::min(sizeof value, rest_.size());
        std::memcpy(&value, rest_.data(), count);
        rest_ = rest_.subspan(count);
        return value;
    }
    [[nodiscard]] std::span<const std::byte> take_bytes(std::size_t most) noexcept {
        const auto piece = rest_.first(std::min(most, rest_.size()));
        rest_ = rest_.subspan(piece.size());
        return std::as_bytes(piece);
    }
    /// A length of two bytes, then so many.
    [[nodiscard]] std::span<const std::byte> take_piece() noexcept { return take_bytes(take<std::uint16_t>()); }
    [[nodiscard]] std::span<const std::byte> take_all() noexcept { return take_bytes(rest_.size()); }

private:
    std::span<const std::uint8_t> rest_;
};

[[nodiscard]] inline std::string_view as_text(std::span<const std::byte> bytes) noexcept {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// A promise that must hold whatever the input is: its breach is a finding.
#define BULKHEAD_PROMISE(condition)                                                                                    \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fmt::print(stderr, "{}:{}: broken promise: {}\n", __FILE__, __LINE__, #condition);                         \
            std::abort();                                                                                              \
        }                                                                                                              \
    } while (false)

}  // namespace bulkhead::fuzz
