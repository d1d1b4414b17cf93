#ifndef KVXFER_CODEC_STORED_NAME_H_
#define KVXFER_CODEC_STORED_NAME_H_

#include <string>

#include "kvxfer/codec.h"

namespace kvxfer {

std::string stored_name(const Stored& stored);  // "bfloat16", "float8_e4m3fn of scale 0.037"

}  // namespace kvxfer

#endif  // KVXFER_CODEC_STORED_NAME_H_
