//! What can happen in the railway valley. Each plot has a beginning, a problem, a way out and an ending.
//!
//! The template language is that of [`grammar`](super::grammar), the names those of [`world`](super::world):
//! `he him his` are the hero's pronouns, `fhe ..` the friend's, `ehe ..` the elder's, `dhe ..` the driver's.

/// How a story begins: who the hero is, then the weather.
pub(super) const OPENING: &str = "\
[[Once upon a time|Long ago|Once] there was a [little ||]{child} named {hero}. \
{He} lived [near the railway|beside the rails|in a house by the station].\
|In a [green|quiet|deep] valley, beside the long rails, lived a [little ||]{child} named {hero}.\
|{hero} was a [kind|brave|quiet|cheerful|clever] {child} who lived \
[near the railway|beside the rails|close to the station].]";

/// The four paragraphs of a story, without the opening and the weather.
pub(super) struct Plot {
    /// What the hero has, wants or does.
    pub(super) premise: &'static str,
    /// What goes wrong.
    pub(super) problem: &'static str,
    /// How it is put right.
    pub(super) rescue: &'static str,
    /// What stays.
    pub(super) ending: &'static str,
}

/// Every plot; each is as likely as the others.
pub(super) const PLOTS: [Plot; 12] = [
    // The lost treasure.
    Plot {
        premise: "{hero} had {a thing}, and {he} [loved it very much|took it everywhere].",
        problem: "But [then|after lunch] the {item} was gone! {hero} looked {spot}, but it was not there. \
            [{He} looked {spot2}, but it was not there either. |]{hero} [began to cry|was very sad].",
        rescue: "\"What is wrong?\" asked {friend}. \"I lost my {item},\" said {hero}. They [walked \
            along|followed] the rails to {place3}. There sat {a beast}, and beside it lay the {thing}!",
        ending: "\"Thank you!\" said {hero}, and {he} gave the {animal} {a food}. {sky} {hero} [never \
            lost the {item} again|held the {item} and smiled].",
    },
    // The steep hill.
    Plot {
        premise: "An iron horse named {engine} worked in the hills.",
        problem: "{engine} had to bring {cargo} to {town}. But the hill was steep, and the rails were \
            {slick}. {engine} puffed and puffed, but [its wheels only slipped|it stood still]. \"I \
            [cannot do it|am not strong enough],\" it said.",
        rescue: "{hero} had an idea. {He} and {friend} put [some sand|sand] on the rails. \"Now try \
            again,\" said {hero}. [Slowly|Bit by bit] {engine} rolled up the hill. [\"Up and up we go!\" \
            sang the wheels.|\"It works!\" said {friend}.]",
        ending: "At the top {engine} blew its whistle [twice|three times|for joy]. The {cargo} came to \
            {town} [in time|before dark]. {sky} \"I am strong when I have [friends|you],\" said {engine}.",
    },
    // The stray animal.
    Plot {
        premise: "{hero} was on the way to {place}.",
        problem: "{Spot2} {he} saw {a beast}. It was all alone. \"Are you lost?\" asked {hero}. The \
            {animal} {cry} [sadly|softly].",
        rescue: "{hero} asked {elder}, \"Is this your {animal}?\" \"No,\" said {elder}, \"but {friend} is \
            looking for it.\" So {hero} led the {animal} [along the rails|past {place3}] to {friend}. \
            \"You found my {animal}!\" [shouted|cried] {friend}, and {fhe} [danced for joy|laughed].",
        ending: "{friend} gave {hero} {a food}, and the {animal} {cry} happily. {sky} From that day on \
            {hero} came to see the {animal} [every day|every Sunday|after school].",
    },
    // The wish.
    Plot {
        premise: "{hero} had one [great|big|secret] wish. {He} wanted to {wish} the iron horse {engine}.",
        problem: "{hero} asked the driver, \"May I {wish} {engine}?\" \"First you must {task},\" said the \
            driver. {hero} {worked}, but {he} [was too small|was soon tired|could not do it alone].",
        rescue: "Then {friend} came by. \"I will help you,\" {fhe} said. [Together|Side by side] they \
            worked until {done}. The driver [smiled|laughed]. \"[Well done|Good work]!\" {dhe} said.",
        ending: "And so {hero} {wished} {engine}, all the way to {town}. {friend} waved [at the cows|to \
            everybody|with both hands]. {sky} It was the best day of the year.",
    },
    // The danger on the rails.
    Plot {
        premise: "{hero} was going to {place} with {a signal}.",
        problem: "[Suddenly|Then] {he} saw {a block} on the rails! And the iron horse {engine} was coming \
            from {town}. [It was very near.|It was coming fast.] \"What can I do?\" thought {hero}.",
        rescue: "{He} took the {signal} and {signalled}. \"Stop! Stop!\" {he} [cried|shouted]. The driver \
            saw {him} and pulled the brake. {engine} stopped just in front of the {block}. {friend} and \
            {elder} came with a rope and pulled it away.",
        ending: "\"You saved us,\" said the driver, and {dhe} gave {hero} {a food}. {sky} [Everybody in \
            the valley was proud of {hero}|{friend} was proud of {hero}|{hero} was tired but happy].",
    },
    // The birthday.
    Plot {
        premise: "It was the birthday of {his} grandmother, and {hero} had {a thing} for her.",
        problem: "{hero} and {friend} took the train to {town}. But near {place} it stopped. {A beast} \
            stood on the rails, and it [did not move|would not go away]. \"We will be late,\" said {hero}.",
        rescue: "\"I think it is hungry,\" said {friend}. So {hero} held out {a food}. The {animal} {cry} \
            and followed {him} off the rails. [\"[Well done|Good work]!\" called the driver.|The train \
            rolled on.]",
        ending: "Grandmother was waiting. \"Happy birthday!\" said {hero}, and gave her the {item}. {sky} \
            They sat by the fire and [told stories|sang songs|ate soup].",
    },
    // Two rails.
    Plot {
        premise: "{hero} and {friend} were playing {spot} when they found {a thing}.",
        problem: "\"It is mine!\" said {hero}. \"No, it is mine!\" said {friend}. They pulled and pulled, \
            and the {item} almost {harm}.[ Soon both of them were angry.| Soon nobody was laughing.|]",
        rescue: "{Elder} heard them. \"A railway has two rails,\" {ehe} said. \"One rail alone goes \
            nowhere.\" {hero} looked at {friend}. \"You may have it today,\" said {hero}. \"And you may \
            have it tomorrow,\" said {friend}.",
        ending: "They took the {thing} to {place2} and played until [it was dark|the evening train came]. \
            {sky} The {item} was [more fun|much nicer] with two.",
    },
    // The broken treasure.
    Plot {
        premise: "{hero} had {a thing}. It was a present from {friend}.",
        problem: "[On the way to {place}|Near {place}] {hero} fell, and the {item} {harm}. \"Oh no!\" \
            said {hero}. {He} [put the {item} under {his} coat|hid the {item} {spot2}] and [said \
            nothing|walked home slowly].",
        rescue: "\"What is wrong?\" asked {friend}, and {hero} told {fhim} everything. {friend} was not \
            angry. \"Let us ask {elder},\" {fhe} said. {Elder} needed only {cure}. [Soon|Before dark] the \
            {item} was as good as new.",
        ending: "\"It is [always good|good] to tell the truth,\" said {elder}. {sky} {hero} and {friend} \
            [walked home hand in hand|laughed all the way home].",
    },
    // The tunnel.
    Plot {
        premise: "{hero} wanted to visit {friend} in {town}, but the way went through a tunnel.",
        problem: "{hero} was afraid of the dark. \"What if there is a [ghost|bear|wolf|giant] in there?\" \
            {he} said. \"Ride with me,\" said the iron horse {engine}. \"I have a lamp.\"",
        rescue: "Into the tunnel they rolled. It was as black as coal. Something {cry}! {engine} turned \
            its lamp. It was only {a beast}! [\"Come with us,\" said {hero}, and the {animal} [jumped \
            up|came along].|\"It is afraid too,\" said {engine}.]",
        ending: "At the other end {friend} was waiting with {a food}. {sky} [From that day on {hero} was \
            not afraid of the dark|Now {hero} was the bravest {child} in the valley].",
    },
    // The kindness that came back.
    Plot {
        premise: "{hero} was on the way to {place} with {a food}.",
        problem: "{Spot2} {he} met {a beast}. It was hungry, so {hero} gave it the {food}. Then it grew \
            dark, and {hero} could not find the way home. [\"Is anybody there?\" {he} called.|Nobody was \
            there to help {him}.]",
        rescue: "But then something {cry} in the dark. It was the {animal}! It led {him} [along the \
            rails|over the hill], past {place3}, and home. {friend} was standing at the door with a \
            lantern.",
        ending: "\"How did you find the way?\" asked {friend}. \"I had a friend,\" said {hero}. {sky} The \
            {animal} [slept by the fire|stayed with {hero}].",
    },
    // The cold engine.
    Plot {
        premise: "{hero} was going to see {his} friend, the iron horse {engine}.",
        problem: "But {engine} [did not wake up|was fast asleep]. Its fire was out. \"No fire, no \
            steam,\" said the driver. \"And {town} needs the {cargo} today.\"",
        rescue: "\"I will bring wood!\" said {hero}. \"I will bring coal!\" said {friend}. [Even {a \
            beast} came from {place} with a stick.|They ran to {place} and back.] Soon the fire was hot. \
            \"Hiss!\" went the steam. \"Good morning,\" said {engine}.[ \"I had a [long|strange|lovely] \
            dream.\"|]",
        ending: "Soon {engine} was rolling to {town} with the {cargo}. {sky} The driver gave {hero} and \
            {friend} {a food} [to share|each].",
    },
    // The new child.
    Plot {
        premise: "That day a new {fchild} came to the valley by train. {Fhis} name was {friend}.",
        problem: "{friend} knew nobody. {Fhe} sat {spot}, all alone. {hero} wanted to say hello, but {he} \
            was shy.",
        rescue: "So {he} ran home and came back with {a thing}. \"Do you want to play with my {item}?\" \
            {he} asked. {friend} [smiled|laughed], and they played {spot2}.[ {A beast} came and {cry} at \
            them. \"It wants to play too!\" said {friend}.|]",
        ending: "Later they shared {a food} and watched the trains. {sky} {friend} was [not alone any \
            more|at home in the valley now].",
    },
];
