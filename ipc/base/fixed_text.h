#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include <fmt/format.h>

namespace bulkhead {

/// Text that lies in place, as it does in a wire field of `field_bytes` with its terminator: a message that holds it
/// needs no heap. Of a text that is too long it keeps the beginning and the true size, so that `fits` says no and
/// whoever would send it can refuse.
template <std::size_t field_bytes>
class FixedText {
public:
    FixedText() noexcept = default;
    template <std::convertible_to<std::string_view> Text>
    requires(!std::same_as<Text, FixedText>) FixedText(const Text& text)
    noexcept : FixedText{std::string_view{text}, 0} {}

    [[nodiscard]] bool fits() const noexcept { return size_ < field_bytes; }
    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
    [[nodiscard]] std::string_view view() const noexcept {
        return {bytes_.data(), std::min<std::size_t>(size_, field_bytes - 1)};
    }
    operator std::string_view() const noexcept { return view(); }

    friend bool operator==(const FixedText& a, const FixedText& b) noexcept {
        return a.size_ == b.size_ && a.view() == b.view();
    }
    template <std::convertible_to<std::string_view> Text>
    requires(!std::same_as<Text, FixedText>) friend bool operator==(const FixedText& a, const Text& b) noexcept {
        return a == FixedText{b};
    }

private:
    FixedText(std::string_view text, int) noexcept : size_{static_cast<std::uint32_t>(text.size())} {
        text.copy(bytes_.data(), field_bytes - 1);
    }

    std::uint32_t size_ = 0;
    std::array<char, field_bytes> bytes_;  ///< the first `size_` of them
};

}  // namespace bulkhead

template <std::size_t field_bytes>
struct fmt::formatter<bulkhead::FixedText<field_bytes>> : fmt::formatter<std::string_view> {
    template <typename Context>
    auto format(const bulkhead::FixedText<field_bytes>& text, Context& context) const {
        return fmt::formatter<std::string_view>::format(text.view(), context);
    }
};
