#ifndef KVXFER_BASE_SHARED_LIBRARY_H_
#define KVXFER_BASE_SHARED_LIBRARY_H_

#include <span>
#include <string>

namespace kvxfer {

// A library that is found at run time. It stays loaded for good, since drivers do not like to go.
class SharedLibrary {
 public:
  // Loads the first of `names` that there is. When there is none, found() is false and problem()
  // has the loader's words on the last.
  explicit SharedLibrary(std::span<const std::string> names);

  bool found() const { return handle_ != nullptr; }
  const std::string& name() const { return name_; }
  const std::string& problem() const { return problem_; }

  // Sets `function` to what `symbol` names, or to null; returns whether there is one.
  template <typename Function>
  bool find(Function*& function, const char* symbol) const {
    function = reinterpret_cast<Function*>(address(symbol));
    return function != nullptr;
  }

 private:
  void* address(const char* symbol) const;

  void* handle_ = nullptr;
  std::string name_;
  std::string problem_;
};

}  // namespace kvxfer

#endif  // KVXFER_BASE_SHARED_LIBRARY_H_
