#pragma once

#include <unistd.h>

#include <utility>

namespace bulkhead {

/// The only owner of a file descriptor. No conversion to `int`: that would let a closed
/// number travel.
class UniqueFd {
public:
    UniqueFd() noexcept = default;
    explicit UniqueFd(int fd) noexcept : fd_{fd} {}
    UniqueFd(UniqueFd&& other) noexcept : fd_{other.release()} {}
    UniqueFd& operator=(UniqueFd&& other) noexcept {
        UniqueFd previous{std::exchange(fd_, other.release())};  // closed at this brace
        return *this;
    }
    UniqueFd(const UniqueFd&) = delete;
    UniqueFd& operator=(const UniqueFd&) = delete;
    ~UniqueFd() {
        if (fd_ >= 0) ::close(fd_);  // never retried: Linux frees the number even on EINTR
    }

    [[nodiscard]] int get() const noexcept { return fd_; }
    [[nodiscard]] int release() noexcept { return std::exchange(fd_, -1); }
    explicit operator bool() const noexcept { return fd_ >= 0; }
    void reset() noexcept { *this = UniqueFd{}; }

private:
    int fd_ = -1;
};

}  // namespace bulkhead
